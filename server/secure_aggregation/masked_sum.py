"""The server of secure aggregation by pairwise masks: four stages, one sum.

    keys -> rosters -> shares -> envelopes -> masked payloads -> unmask requests -> shares -> sum

A pure state machine. A client that stays out of a stage stays out of the following ones. Threat
model: the server follows the protocol (semi-honest); clients check what a deviating server could
gain most from, see `fedsim.clients.masked_upload`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fedsim.server.secure_aggregation.context import RoundContext
from fedsim.server.secure_aggregation.digests import add_checked
from fedsim.server.secure_aggregation.encoding import Ring
from fedsim.server.secure_aggregation.errors import (
    ContextMismatchError,
    DuplicateClientError,
    LayoutMismatchError,
    ProtocolOrderError,
    SecureAggregationError,
    ShareMismatchError,
    ThresholdError,
    TooFewClientsError,
    WireError,
)
from fedsim.server.secure_aggregation.graph import NeighbourGraph
from fedsim.server.secure_aggregation.hpke import SealingKey, check_distinct, checked_public_key
from fedsim.server.secure_aggregation.layout import Arrays
from fedsim.server.secure_aggregation.messages import (
    KeysReply,
    MaskedReply,
    MaskRequest,
    Roster,
    RoundOffer,
    SharesReply,
    UnmaskReply,
    UnmaskRequest,
)
from fedsim.server.secure_aggregation.pairwise import PairwiseMasking, commitment, masked_info
from fedsim.server.secure_aggregation.payload import Aggregate, PayloadCodec
from fedsim.server.secure_aggregation.prg import SeedExpander
from fedsim.server.secure_aggregation.settings import SecureAggregationSettings
from fedsim.server.secure_aggregation.shamir import ShamirSharing

_KEYS, _SHARES, _MASKED, _UNMASK = range(4)
_STAGES = ("keys", "shares", "masked", "unmask")


@dataclass(frozen=True)
class _Recovered:
    """Secrets put together from shares: self-mask seeds, and masking keys of the dead."""

    seeds: dict[int, bytes]
    keys: dict[int, bytes]


class MaskedSum:
    """One round of SecAgg or SecAgg+, seen from the server.

    Guarantee: `open` returns the exact sum over the clients whose masked payload came, or an error
    is raised. Recovered secrets are checked against public keys and commitments, so a wrong share
    names its owner and never reaches the model.

    Args:
        codec: the payload.
        context: the round; its nonce must be fresh.
        settings: protocol, threshold or fractions, min_clients, prg.
        clients: who was asked.
    """

    def __init__(
        self,
        *,
        codec: PayloadCodec,
        context: RoundContext,
        settings: SecureAggregationSettings,
        clients: Iterable[int],
    ) -> None:
        self._codec = codec
        self._context = context
        self._settings = settings
        self._asked = set(clients)
        self._stage = _KEYS
        self._keys: dict[int, KeysReply] = {}
        self._shares: dict[int, SharesReply] = {}
        self._paired: dict[int, tuple[int, ...]] = {}
        self._masked: set[int] = set()
        self._unmasked: dict[int, UnmaskReply] = {}
        self._total: Ring = np.zeros(codec.length, codec.encoder.dtype)
        self._graph: NeighbourGraph | None = None

    @property
    def clients(self) -> list[int]:
        """The clients in the sum, in ascending order."""
        return sorted(self._masked)

    @property
    def graph(self) -> NeighbourGraph:
        """Who masks with whom, known after `rosters`."""
        if self._graph is None:
            raise ProtocolOrderError("the graph is drawn when the keys are closed; call rosters()")
        return self._graph

    def offer(self) -> RoundOffer:
        """Return what clients need to know of the round."""
        context = self._context
        return RoundOffer(
            run_id=context.run_id,
            round_nonce=context.round_nonce,
            server_round=context.server_round,
            layout=context.layout,
            params=context.params,
            model=context.model,
            helpers=(),
            helper_keys=(),
        )

    def take_keys(self, reply: KeysReply) -> None:
        """Take the public keys of a client.

        Raises:
            PublicKeyError: malformed, of low order, or not distinct.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: not its turn.
        """
        self._expect(reply.client, _KEYS, self._asked, self._keys)
        checked_public_key(reply.sealing_key, owner=reply.client)
        checked_public_key(reply.masking_key, owner=reply.client)
        known = [
            key for each in self._keys.values() for key in (each.sealing_key, each.masking_key)
        ]
        check_distinct([*known, reply.sealing_key, reply.masking_key])
        self._keys[reply.client] = reply

    def rosters(self) -> dict[int, Roster]:
        """Close the keys, draw the graph and return each client's neighbours and their keys.

        Raises:
            TooFewClientsError, ThresholdError: no sum can come of this round.
        """
        self._advance(_KEYS)
        self._check_enough(len(self._keys))
        self._graph = graph = NeighbourGraph.for_round(self._settings, list(self._keys))
        return {client: self._roster(graph, client) for client in graph.clients}

    def take_shares(self, reply: SharesReply) -> None:
        """Take the sealed shares of a client's secrets.

        Raises:
            WireError: not exactly one envelope for each neighbour.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: not its turn.
        """
        self._expect(reply.client, _SHARES, self._keys, self._shares)
        neighbours = self.graph.neighbours[reply.client]
        if reply.receivers != neighbours or len(reply.envelopes) != len(neighbours):
            raise WireError(
                "it must send one envelope for each neighbour, in their order",
                round_number=self._context.server_round,
                client=reply.client,
            )
        self._shares[reply.client] = reply

    def mask_requests(self) -> dict[int, MaskRequest]:
        """Close the shares and return, for each client, the envelopes of its neighbours.

        A client with fewer holders than the threshold is left out: its secrets could not be
        recovered.

        Raises:
            ThresholdError, TooFewClientsError: too many are gone.
        """
        self._advance(_SHARES)
        alive = self._with_enough_holders()
        self._check_enough(len(alive))
        for client in sorted(alive):
            self._paired[client] = tuple(
                peer for peer in self.graph.neighbours[client] if peer in alive
            )
        return {client: self._mask_request(client) for client in self._paired}

    def take_masked(self, reply: MaskedReply) -> None:
        """Add the masked payload of a client to the sum.

        Raises:
            LayoutMismatchError, ShareMismatchError: malformed or damaged.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: not its turn.
        """
        self._expect(reply.client, _MASKED, self._paired, self._masked)
        if reply.masked.shape != self._total.shape or reply.masked.dtype != self._total.dtype:
            raise LayoutMismatchError(
                f"expected {self._total.dtype}[{len(self._total)}], "
                f"got {reply.masked.dtype}{list(reply.masked.shape)}",
                round_number=self._context.server_round,
                client=reply.client,
            )
        add_checked(
            self._total,
            reply.masked,
            masked_info(self._context, reply.client),
            reply.tag,
            what="the masked payload",
            client=reply.client,
        )
        self._masked.add(reply.client)

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """Close the payloads and ask each of their senders for the shares that unmask the sum.

        Raises:
            TooFewClientsError: fewer than `min_clients` payloads.
            ThresholdError: a secret has fewer living holders than the threshold.
        """
        self._advance(_MASKED)
        self._check_enough(len(self._masked))
        self._check_recoverable()
        return {client: self._unmask_request(client) for client in self.clients}

    def take_unmask(self, reply: UnmaskReply) -> None:
        """Take the shares that a client holds.

        Raises:
            WireError: it answers something else than it was asked.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: not its turn.
        """
        self._expect(reply.client, _UNMASK, self._masked, self._unmasked)
        asked = self._unmask_request(reply.client)
        answered = (reply.active, reply.dead, len(reply.seed_shares), len(reply.key_shares))
        if answered != (asked.active, asked.dead, len(asked.active), len(asked.dead)):
            raise WireError(
                "it answered for other clients than it was asked for",
                round_number=self._context.server_round,
                client=reply.client,
            )
        self._unmasked[reply.client] = reply

    def open(self, *, reference: Arrays | None) -> Aggregate:
        """Remove the masks and return the aggregate.

        Raises:
            ThresholdError: too few clients answered to recover a secret.
            ShareMismatchError: a recovered secret or the sum is wrong.
            ZeroWeightError: the weights add up to nothing.
        """
        if self._stage != _UNMASK:
            raise ProtocolOrderError(
                f"the round is at the stage {_STAGES[self._stage]}; call unmask_requests() first"
            )
        recovered = self._recover()
        total = self._total.copy()
        self._unmask(total, recovered)
        return self._codec.decode(total, clients=len(self._masked), reference=reference)

    def _roster(self, graph: NeighbourGraph, client: int) -> Roster:
        holders = graph.holders(client)
        return Roster(
            clients=holders,
            points=tuple(graph.point(holder) for holder in holders),
            sealing_keys=tuple(self._keys[holder].sealing_key for holder in holders),
            masking_keys=tuple(self._keys[holder].masking_key for holder in holders),
            threshold=graph.threshold,
        )

    def _with_enough_holders(self) -> set[int]:
        alive = set(self._shares)
        while True:
            short = {
                client
                for client in alive
                if len(alive & set(self.graph.holders(client))) < self.graph.threshold
            }
            if short == alive:
                raise ThresholdError(
                    "too few clients sent shares of their secrets",
                    have=len(self._shares),
                    need=self.graph.threshold,
                    round_number=self._context.server_round,
                )
            if not short:
                return alive
            alive -= short

    def _check_recoverable(self) -> None:
        for owner in sorted(self._masked | self._touched()):
            have = len(self._masked & set(self.graph.holders(owner)))
            if have < self.graph.threshold:
                raise ThresholdError(
                    "too few clients are left to recover its secret",
                    have=have,
                    need=self.graph.threshold,
                    round_number=self._context.server_round,
                    client=owner,
                )

    def _touched(self) -> set[int]:
        """Return the dead whose masks are in the sum."""
        dead = set(self._paired) - self._masked
        return {one for one in dead if self._masked & set(self._paired[one])}

    def _mask_request(self, client: int) -> MaskRequest:
        senders = self._paired[client]
        envelopes = []
        for sender in senders:
            reply = self._shares[sender]
            envelopes.append(reply.envelopes[reply.receivers.index(client)])
        return MaskRequest(senders=senders, envelopes=tuple(envelopes))

    def _unmask_request(self, client: int) -> UnmaskRequest:
        own = (client,) if self.graph.complete else ()
        known = sorted((*self._paired[client], *own))
        return UnmaskRequest(
            active=tuple(peer for peer in known if peer in self._masked),
            dead=tuple(peer for peer in known if peer not in self._masked),
        )

    def _recover(self) -> _Recovered:
        seed_shares: dict[int, dict[int, bytes]] = {client: {} for client in self._masked}
        touched = self._touched()
        key_shares: dict[int, dict[int, bytes]] = {client: {} for client in touched}
        for holder, reply in sorted(self._unmasked.items()):
            point = self.graph.point(holder)
            for owner, share in zip(reply.active, reply.seed_shares, strict=True):
                seed_shares[owner][point] = share
            for owner, share in zip(reply.dead, reply.key_shares, strict=True):
                key_shares[owner][point] = share
        return _Recovered(
            seeds={
                one: self._secret(one, seed_shares[one], self._own_seed) for one in self._masked
            },
            keys={one: self._secret(one, key_shares[one], self._own_key) for one in touched},
        )

    def _secret(
        self, owner: int, shares: dict[int, bytes], genuine: Callable[[int, bytes], bool]
    ) -> bytes:
        where = {"round_number": self._context.server_round, "client": owner}
        try:
            secret = ShamirSharing(self.graph.threshold).combine(shares)
        except ThresholdError as error:
            have, need = len(shares), self.graph.threshold
            message = "too few clients are left to recover its secret"
            raise ThresholdError(message, have=have, need=need, **where) from error
        except SecureAggregationError as error:
            raise ShareMismatchError(str(error), **where) from error
        if not genuine(owner, secret):
            raise ShareMismatchError(
                "its recovered secret is not the one it committed to; a share was wrong", **where
            )
        return secret

    def _own_seed(self, owner: int, seed: bytes) -> bool:
        return commitment(self._context, owner, seed) == self._shares[owner].commitment

    def _own_key(self, owner: int, private: bytes) -> bool:
        return SealingKey.from_bytes(private).public == self._keys[owner].masking_key

    def _unmask(self, total: Ring, recovered: _Recovered) -> None:
        masking = PairwiseMasking(self._context, SeedExpander(self._settings.prg))
        for client, seed in recovered.seeds.items():
            masking.own(client, seed, remove=True)
        for dead, private in recovered.keys.items():
            for peer in self._paired[dead]:
                if peer in self._masked:
                    masking.pair(dead, private, peer, self._keys[peer].masking_key)
        masking.apply(total)

    def _expect(
        self, client: int, stage: int, invited: Iterable[int], before: Iterable[int]
    ) -> None:
        where = {"round_number": self._context.server_round, "client": client}
        if self._stage != stage:
            raise ProtocolOrderError(
                f"a reply to {_STAGES[stage]} at the stage {_STAGES[self._stage]}", **where
            )
        if client in before:
            raise DuplicateClientError(
                f"it answered {_STAGES[stage]} before; the first answer counts", **where
            )
        if client not in invited:
            raise ContextMismatchError(f"it was not asked for {_STAGES[stage]}", **where)

    def _advance(self, stage: int) -> None:
        if self._stage != stage:
            raise ProtocolOrderError(
                f"{_STAGES[stage]} cannot be closed at the stage {_STAGES[self._stage]}",
                round_number=self._context.server_round,
            )
        self._stage += 1

    def _check_enough(self, have: int) -> None:
        if have < self._settings.min_clients:
            raise TooFewClientsError(
                f"{have} clients are left, but min_clients is {self._settings.min_clients}; "
                "ask more clients, or lower min_clients",
                round_number=self._context.server_round,
                have=have,
                need=self._settings.min_clients,
            )
