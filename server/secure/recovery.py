"""Removal of the masks from a masked sum, with secrets recovered from the clients' shares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    ProtocolOrderError,
    SecureAggregationError,
    ShareMismatchError,
    ThresholdError,
)
from fedsim.secagg.graph import NeighbourGraph
from fedsim.secagg.hpke import SealingKey
from fedsim.secagg.masks import PairwiseMasks, SeedExpander, commitment
from fedsim.secagg.messages import KeysReply, SharesReply, UnmaskReply
from fedsim.secagg.shamir import ShamirSharing


@dataclass(kw_only=True)
class Recovery:
    """Record of what clients sent in a round, and removal of the masks of the sum with it.

    Guarantee: every recovered secret is checked against the public key or the commitment of its
    owner. A wrong share is reported with the owner and never reaches a sum. At most one secret of a
    client is recovered: its self-mask seed if the client is in the sum, else its masking key.

    Attributes:
        context: the context of the round.
        expander: the keystream generator of the masks.
        keys: the public keys of every client that sent them.
        drawn: the graph of clients, once it is drawn.
        shares: the message of every client with the commitments to its secrets.
        mask_peers: for each client asked for a masked update, the clients with which it shares
            masks.
        summed_clients: the clients in the sum.
    """

    context: RoundContext
    expander: SeedExpander
    keys: dict[int, KeysReply] = field(default_factory=dict[int, KeysReply])
    drawn: NeighbourGraph | None = None
    shares: dict[int, SharesReply] = field(default_factory=dict[int, SharesReply])
    mask_peers: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    summed_clients: set[int] = field(default_factory=set[int])

    @property
    def graph(self) -> NeighbourGraph:
        """Graph of clients; the neighbours of a client hold the shares of its secrets."""
        if self.drawn is None:
            raise ProtocolOrderError("the graph is drawn by rosters(); call it first")
        return self.drawn

    def check_holders(self) -> None:
        """Check that every needed secret can be recovered by the clients in the sum.

        Raises:
            ThresholdError: fewer clients than the threshold hold shares of a secret.
        """
        alive = self.summed_clients
        for owner in sorted(alive | self._dropped_in_sum()):
            have = len(alive & set(self.graph.holders(owner)))
            if have < self.graph.threshold:
                raise self._too_few(owner, have)

    def remove_masks(self, total: Ring, replies: Mapping[int, UnmaskReply]) -> None:
        """Remove all masks from a sum, in place.

        Args:
            total: the sum of the masked updates, ring elements (d,).
            replies: the unmasking shares that each client holds, by client number.

        Raises:
            ThresholdError: too few clients answered.
            ShareMismatchError: a recovered secret is not the one that its owner committed to.
        """
        seeds, private_keys = self._recover_secrets(replies)
        masking = PairwiseMasks(self.context, self.expander)
        for client, seed in seeds.items():
            masking.add_self_mask(client, seed, remove=True)
        for dead, private in private_keys.items():
            for peer in self.mask_peers[dead]:
                if peer in self.summed_clients:
                    masking.add_pairwise_mask(dead, private, peer, self.keys[peer].masking_key)
        masking.apply(total)

    def _dropped_in_sum(self) -> set[int]:
        """Return the clients that dropped out but whose pairwise masks are in the sum."""
        alive = self.summed_clients
        return {
            client
            for client in set(self.mask_peers) - alive
            if alive & set(self.mask_peers[client])
        }

    def _recover_secrets(
        self, replies: Mapping[int, UnmaskReply]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return the self-mask seeds of summed clients, and the masking keys of dropped clients."""
        seed_shares: dict[int, dict[int, bytes]] = {client: {} for client in self.summed_clients}
        key_shares: dict[int, dict[int, bytes]] = {client: {} for client in self._dropped_in_sum()}
        for holder, reply in sorted(replies.items()):
            point = self.graph.point(holder)
            for owner, share in zip(reply.active, reply.seed_shares, strict=True):
                seed_shares[owner][point] = share
            for owner, share in zip(reply.dead, reply.key_shares, strict=True):
                key_shares[owner][point] = share
        return (
            {
                owner: self._recover_secret(owner, shares, self._is_own_seed)
                for owner, shares in seed_shares.items()
            },
            {
                owner: self._recover_secret(owner, shares, self._is_own_key)
                for owner, shares in key_shares.items()
            },
        )

    def _recover_secret(
        self, owner: int, shares: dict[int, bytes], is_genuine: Callable[[int, bytes], bool]
    ) -> bytes:
        where = {"round_number": self.context.server_round, "client": owner}
        try:
            secret = ShamirSharing(self.graph.threshold).combine(shares)
        except ThresholdError as error:
            raise self._too_few(owner, len(shares)) from error
        except SecureAggregationError as error:
            raise ShareMismatchError(str(error), **where) from error
        if not is_genuine(owner, secret):
            raise ShareMismatchError(
                "its recovered secret is not the one it committed to; a share was wrong", **where
            )
        return secret

    def _is_own_seed(self, owner: int, seed: bytes) -> bool:
        return commitment(self.context, owner, seed) == self.shares[owner].commitment

    def _is_own_key(self, owner: int, private: bytes) -> bool:
        return SealingKey.from_bytes(private).public == self.keys[owner].masking_key

    def _too_few(self, owner: int, have: int) -> ThresholdError:
        return ThresholdError(
            "too few clients are left to recover its secret",
            have=have,
            need=self.graph.threshold,
            round_number=self.context.server_round,
            client=owner,
        )
