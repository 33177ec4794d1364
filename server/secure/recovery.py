"""What takes the masks off a masked sum: secrets put together from the shares that clients hold."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    SecureAggregationError,
    ShareMismatchError,
    ThresholdError,
)
from fedsim.secagg.graph import NeighbourGraph
from fedsim.secagg.hpke import SealingKey
from fedsim.secagg.messages import KeysReply, SharesReply, UnmaskReply
from fedsim.secagg.pairwise import PairwiseMasking, commitment
from fedsim.secagg.prg import SeedExpander
from fedsim.secagg.shamir import ShamirSharing

_LOST = "too few clients are left to recover its secret"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The masks in a sum, and how they come off.

    Guarantee: every recovered secret is checked against the public key or the commitment of its
    owner, so that a wrong share names the owner and never reaches a sum. Of no client both secrets
    are recovered: of the summed the self-mask seed, of the others the masking key.

    Attributes:
        context: the round.
        graph: who holds shares of whose secrets.
        expander: the keystream behind the masks.
        keys: the public keys of every client.
        shares: the commitments of every client.
        paired: for each client that was asked to mask, with whom.
        masked: the clients in the sum.
    """

    context: RoundContext
    graph: NeighbourGraph
    expander: SeedExpander
    keys: Mapping[int, KeysReply]
    shares: Mapping[int, SharesReply]
    paired: Mapping[int, tuple[int, ...]]
    masked: Collection[int]

    def check_possible(self) -> None:
        """Check that every secret that is needed has enough holders among the summed clients.

        Raises:
            ThresholdError: one has not.
        """
        alive = set(self.masked)
        for owner in sorted(alive | self._touched()):
            have = len(alive & set(self.graph.holders(owner)))
            if have < self.graph.threshold:
                raise self._too_few(owner, have)

    def remove(self, total: Ring, replies: Mapping[int, UnmaskReply]) -> None:
        """Take all masks off a sum, in place.

        Args:
            total: the sum of the masked payloads.
            replies: what each holder answered.

        Raises:
            ThresholdError: too few holders answered.
            ShareMismatchError: a recovered secret is not its owner's.
        """
        seeds, private_keys = self._recovered(replies)
        masking = PairwiseMasking(self.context, self.expander)
        for client, seed in seeds.items():
            masking.own(client, seed, remove=True)
        for dead, private in private_keys.items():
            for peer in self.paired[dead]:
                if peer in self.masked:
                    masking.pair(dead, private, peer, self.keys[peer].masking_key)
        masking.apply(total)

    def _touched(self) -> set[int]:
        """Return the dead whose masks are in the sum."""
        alive = set(self.masked)
        return {one for one in set(self.paired) - alive if alive & set(self.paired[one])}

    def _recovered(
        self, replies: Mapping[int, UnmaskReply]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return the seeds of the summed clients and the masking keys of the dead."""
        seed_shares: dict[int, dict[int, bytes]] = {client: {} for client in self.masked}
        key_shares: dict[int, dict[int, bytes]] = {client: {} for client in self._touched()}
        for holder, reply in sorted(replies.items()):
            point = self.graph.point(holder)
            for owner, share in zip(reply.active, reply.seed_shares, strict=True):
                seed_shares[owner][point] = share
            for owner, share in zip(reply.dead, reply.key_shares, strict=True):
                key_shares[owner][point] = share
        return (
            {one: self._secret(one, own, self._own_seed) for one, own in seed_shares.items()},
            {one: self._secret(one, own, self._own_key) for one, own in key_shares.items()},
        )

    def _secret(
        self, owner: int, shares: dict[int, bytes], genuine: Callable[[int, bytes], bool]
    ) -> bytes:
        where = {"round_number": self.context.server_round, "client": owner}
        try:
            secret = ShamirSharing(self.graph.threshold).combine(shares)
        except ThresholdError as error:
            raise self._too_few(owner, len(shares)) from error
        except SecureAggregationError as error:
            raise ShareMismatchError(str(error), **where) from error
        if not genuine(owner, secret):
            raise ShareMismatchError(
                "its recovered secret is not the one it committed to; a share was wrong", **where
            )
        return secret

    def _own_seed(self, owner: int, seed: bytes) -> bool:
        return commitment(self.context, owner, seed) == self.shares[owner].commitment

    def _own_key(self, owner: int, private: bytes) -> bool:
        return SealingKey.from_bytes(private).public == self.keys[owner].masking_key

    def _too_few(self, owner: int, have: int) -> ThresholdError:
        return ThresholdError(
            _LOST,
            have=have,
            need=self.graph.threshold,
            round_number=self.context.server_round,
            client=owner,
        )
