"""Pairwise masks that cancel in the sum, and a self-mask of each client.

Client u uploads Y + PRG(b_u) + Σ_{v>u} PRG(s_uv) - Σ_{v<u} PRG(s_uv). The secrets s_uv come from a
key agreement and their masks cancel. The self-mask of b_u hides a late upload after the server has
recovered s_uv.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning".
"""

from dataclasses import dataclass, field

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.hpke import agree
from fedsim.secagg.prg import SeedExpander, derive_key


@dataclass
class PairwiseMasks:
    """Collects the masks of one round and applies all of them in two passes over the vector.

    Args:
        context: context of the round; part of every mask's key.
        expander: keystream generator of the masks.
    """

    context: RoundContext
    expander: SeedExpander
    _plus: list[bytes] = field(default_factory=list)
    _minus: list[bytes] = field(default_factory=list)

    def add_self_mask(self, client: int, seed: bytes, *, remove: bool = False) -> None:
        """Collect the self-mask of a client.

        Args:
            client: number of the client.
            seed: its self-mask seed b_u, 32 bytes.
            remove: subtract the mask instead of adding it.
        """
        info = self.context.info(purpose="self mask", sender=client, receiver=client)
        (self._minus if remove else self._plus).append(derive_key(seed, info))

    def add_pairwise_mask(self, client: int, private: bytes, peer: int, public: bytes) -> None:
        """Collect the client's mask with a peer.

        The masks of both clients cancel, so the server adds the mask of a client that dropped out.

        Args:
            client: number of the client that owns the private key.
            private: its private masking key, 32 bytes.
            peer: number of the other client.
            public: the peer's public masking key, 32 bytes.
        """
        low, high = min(client, peer), max(client, peer)
        info = self.context.info(purpose="pairwise mask", sender=low, receiver=high)
        key = derive_key(agree(private, public, owner=peer), info)
        (self._plus if client == low else self._minus).append(key)

    def apply(self, vector: Ring) -> None:
        """Apply the collected masks to a vector, in place, and discard them."""
        self.expander.add_into(vector, self._plus)
        self.expander.add_into(vector, self._minus, subtract=True)
        self._plus, self._minus = [], []


def commitment(context: RoundContext, client: int, seed: bytes) -> bytes:
    """Return a hash of a self-mask seed, 32 bytes; it hides the seed, which has 256 random bits.

    Args:
        context: context of the round.
        client: number of the client that owns the seed.
        seed: 32 bytes.
    """
    info = context.info(purpose="self mask commitment", sender=client, receiver=0)
    return derive_key(seed, info)


def secret_share_info(context: RoundContext, sender: int, receiver: int) -> bytes:
    """Return the `info` of sealed secret shares.

    Args:
        context: context of the round.
        sender: number of the client that owns the secrets.
        receiver: number of the client that holds the shares.
    """
    return context.info(purpose="secret shares", sender=sender, receiver=receiver)


def masked_info(context: RoundContext, client: int) -> bytes:
    """Return the `info` of a masked payload.

    Args:
        context: context of the round.
        client: number of the client that sends it.
    """
    return context.info(purpose="masked payload", sender=client, receiver=0)
