"""Pairwise masks that cancel in the sum, and a self-mask for everybody.

Client u uploads Y + PRG(b_u) + Σ_{v>u} PRG(s_uv) - Σ_{v<u} PRG(s_uv). The masks s_uv come from a
key agreement and cancel; b_u keeps a late upload hidden when s_uv had to be recovered.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning".
"""

from dataclasses import dataclass, field

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.hpke import agree
from fedsim.secagg.prg import SeedExpander, derive_key


@dataclass
class PairwiseMasking:
    """Collects masks of one round and applies all of them in two passes over the vector.

    Args:
        context: the round; part of every key.
        expander: the keystream behind the masks.
    """

    context: RoundContext
    expander: SeedExpander
    _plus: list[bytes] = field(default_factory=list)
    _minus: list[bytes] = field(default_factory=list)

    def own(self, client: int, seed: bytes, *, remove: bool = False) -> None:
        """Add the self-mask of a client, or remove it."""
        info = self.context.info(purpose="self mask", sender=client, receiver=client)
        (self._minus if remove else self._plus).append(derive_key(seed, info))

    def pair(self, client: int, private: bytes, peer: int, public: bytes) -> None:
        """Add the client's half of the mask that it shares with `peer`.

        Both halves cancel, so the server puts in the half of a client that dropped out.

        Args:
            client: the owner of the private key.
            private: its masking key.
            peer: the other client.
            public: the peer's public masking key.
        """
        low, high = min(client, peer), max(client, peer)
        info = self.context.info(purpose="pairwise mask", sender=low, receiver=high)
        key = derive_key(agree(private, public, owner=peer), info)
        (self._plus if client == low else self._minus).append(key)

    def apply(self, vector: Ring) -> None:
        """Apply everything collected to the vector, in place, and forget it."""
        self.expander.add_into(vector, self._plus)
        self.expander.add_into(vector, self._minus, subtract=True)
        self._plus, self._minus = [], []


def commitment(context: RoundContext, client: int, seed: bytes) -> bytes:
    """Return a hash of a self-mask seed; the seed has 256 random bits, so it stays hidden."""
    info = context.info(purpose="self mask commitment", sender=client, receiver=0)
    return derive_key(seed, info)


def share_info(context: RoundContext, sender: int, receiver: int) -> bytes:
    """Return the bytes that name the shares which `sender` gives to `receiver`."""
    return context.info(purpose="secret shares", sender=sender, receiver=receiver)


def masked_info(context: RoundContext, client: int) -> bytes:
    """Return the bytes that name the masked payload of a client."""
    return context.info(purpose="masked payload", sender=client, receiver=0)
