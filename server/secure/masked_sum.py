"""Server side of secure aggregation by pairwise masks (SecAgg, SecAgg+).

The messages of a round, in order:

    keys -> rosters -> shares -> envelopes -> masked payloads -> unmask requests -> shares -> sum

The server is a state machine; its caller sends the messages. A client that misses a stage drops out
of the following stages. Threat model: the server follows the protocol (semi-honest). Clients check
those requests with which a dishonest server could learn most
(`fedsim.clients.secure.masked_upload`).
"""

from collections.abc import Iterable

import numpy as np

from fedsim.secagg.context import RoundContext
from fedsim.secagg.digests import verify_and_add
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    ContextMismatchError,
    DuplicateClientError,
    ProtocolOrderError,
    ThresholdError,
    WireError,
    check_enough_clients,
)
from fedsim.secagg.fields import check_fields
from fedsim.secagg.graph import NeighbourGraph
from fedsim.secagg.hpke import check_distinct, load_public_key
from fedsim.secagg.masks import SeedExpander, masked_info
from fedsim.secagg.messages import (
    KeysReply,
    MaskedReply,
    MaskRequest,
    Roster,
    RoundOffer,
    SharesReply,
    UnmaskReply,
    UnmaskRequest,
)
from fedsim.secagg.payload import DecodedSum, NamedArrays, PayloadCodec
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.secure.recovery import Recovery

_KEYS, _SHARES, _MASKED, _UNMASK = range(4)
_STAGES = ("keys", "shares", "masked", "unmask")
_Reply = KeysReply | SharesReply | MaskedReply | UnmaskReply


class MaskedSum:
    """State machine for one round of SecAgg or SecAgg+ on the server.

    Guarantee: `open` returns the exact sum over the clients whose masked payload arrived, or
    raises. Secrets that are recovered from shares are checked against public keys and commitments.
    So a wrong share is reported with its owner and never changes the model.

    Args:
        codec: the encoder of updates as ring elements (integers modulo a power of 2).
        context: the run, round, model and fresh nonce to which all messages are bound.
        settings: the settings of secure aggregation.
        clients: the numbers of the clients that are asked.
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
        self._settings = settings
        self._invited_clients = set(clients)
        self._stage = _KEYS
        self._sent = Recovery(context=context, expander=SeedExpander(settings.prg))
        self._unmask_replies: dict[int, UnmaskReply] = {}
        self._total: Ring = np.zeros(codec.length, codec.encoder.dtype)

    @property
    def clients(self) -> list[int]:
        """Clients in the sum, in ascending order."""
        return sorted(self._sent.summed_clients)

    @property
    def graph(self) -> NeighbourGraph:
        """Graph whose edges are the pairs of clients that share masks; `rosters` draws it."""
        return self._sent.graph

    def offer(self) -> RoundOffer:
        """Return the parameters of the round (the offer), which train requests carry."""
        return RoundOffer(**vars(self._sent.context), helpers=(), helper_keys=())

    def take_keys(self, reply: KeysReply) -> None:
        """Store the public keys that a client sent.

        Raises:
            PublicKeyError: a key is malformed, of low order, or not distinct.
            WireError: a field of the message is malformed.
            DuplicateClientError: the client sent its keys before.
            ContextMismatchError: the client was not asked for its keys.
            ProtocolOrderError: the round is at another stage.
        """
        self._check_turn(reply, _KEYS, self._invited_clients, self._sent.keys)
        load_public_key(reply.sealing_key, owner=reply.client)
        load_public_key(reply.masking_key, owner=reply.client)
        known = [
            key
            for reply_before in self._sent.keys.values()
            for key in (reply_before.sealing_key, reply_before.masking_key)
        ]
        check_distinct([*known, reply.sealing_key, reply.masking_key])
        self._sent.keys[reply.client] = reply

    def rosters(self) -> dict[int, Roster]:
        """End the stage of keys, draw the graph, and return each client's neighbours with keys.

        Raises:
            TooFewClientsError, ThresholdError: too few clients sent keys.
        """
        self._close_stage(_KEYS)
        self._check_enough(len(self._sent.keys))
        self._sent.drawn = graph = NeighbourGraph.for_round(self._settings, list(self._sent.keys))
        return {client: self._roster(graph, client) for client in graph.clients}

    def take_shares(self, reply: SharesReply) -> None:
        """Store the encrypted shares of a client's secrets.

        Raises:
            WireError: a field is malformed, or the shares are not one for each neighbour.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: the client sent this
                message before, was not asked for it, or sent it at the wrong stage.
        """
        self._check_turn(reply, _SHARES, self._sent.keys, self._sent.shares)
        neighbours = self.graph.neighbours[reply.client]
        if reply.receivers != neighbours or len(reply.envelopes) != len(neighbours):
            raise WireError(
                "it must send one envelope for each neighbour, in their order",
                round_number=self._sent.context.server_round,
                client=reply.client,
            )
        self._sent.shares[reply.client] = reply

    def mask_requests(self) -> dict[int, MaskRequest]:
        """End the stage of shares; return the encrypted secret shares for each client, by client.

        A client gets its shares of its neighbours' secrets. A client is left out if its own secrets
        could not be recovered, because fewer neighbours than the threshold hold shares of them.

        Raises:
            ThresholdError, TooFewClientsError: too many clients dropped out.
        """
        self._close_stage(_SHARES)
        alive = self._with_enough_holders()
        self._check_enough(len(alive))
        for client in sorted(alive):
            self._sent.mask_peers[client] = tuple(
                peer for peer in self.graph.neighbours[client] if peer in alive
            )
        return {client: self._mask_request(client) for client in self._sent.mask_peers}

    def take_masked(self, reply: MaskedReply) -> None:
        """Add the masked update that a client sent to the sum.

        Raises:
            LayoutMismatchError, ShareMismatchError: the payload is malformed or damaged.
            WireError: a field of the message is malformed.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: the client sent this
                message before, was not asked for it, or sent it at the wrong stage.
        """
        self._check_turn(reply, _MASKED, self._sent.mask_peers, self._sent.summed_clients)
        self._codec.check_vector(
            reply.masked, round_number=self._sent.context.server_round, client=reply.client
        )
        verify_and_add(
            self._total,
            reply.masked,
            masked_info(self._sent.context, reply.client),
            reply.tag,
            name="the masked payload",
            client=reply.client,
        )
        self._sent.summed_clients.add(reply.client)

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """End the stage of masked updates and return each client's request for unmasking shares.

        Raises:
            TooFewClientsError: fewer than `min_clients` masked updates arrived.
            ThresholdError: too few clients in the sum hold shares of some secret.
        """
        self._close_stage(_MASKED)
        self._check_enough(len(self._sent.summed_clients))
        self._sent.check_holders()
        return {client: self._unmask_request(client) for client in self.clients}

    def take_unmask(self, reply: UnmaskReply) -> None:
        """Store the unmasking shares that a client sent.

        Raises:
            WireError: the reply does not match the request, or a field is malformed.
            DuplicateClientError, ContextMismatchError, ProtocolOrderError: the client sent this
                message before, was not asked for it, or sent it at the wrong stage.
        """
        self._check_turn(reply, _UNMASK, self._sent.summed_clients, self._unmask_replies)
        asked = self._unmask_request(reply.client)
        answered = (reply.active, reply.dead, len(reply.seed_shares), len(reply.key_shares))
        if answered != (asked.active, asked.dead, len(asked.active), len(asked.dead)):
            raise WireError(
                "it sent shares of other clients than those requested",
                round_number=self._sent.context.server_round,
                client=reply.client,
            )
        self._unmask_replies[reply.client] = reply

    def open(self, *, reference: NamedArrays | None) -> DecodedSum:
        """Remove the masks and return the decoded sum of the clients' updates.

        Args:
            reference: the model to which decoded changes are added; None if clients sent models.

        Raises:
            ThresholdError: too few clients answered to recover a secret.
            ShareMismatchError: a recovered secret or the sum is wrong.
            ZeroWeightError: the weights add up to 0.
        """
        if self._stage != _UNMASK:
            raise ProtocolOrderError(
                f"the round is at the stage {_STAGES[self._stage]}; call unmask_requests() first"
            )
        total = self._total.copy()
        self._sent.remove_masks(total, self._unmask_replies)
        return self._codec.decode(
            total, num_clients=len(self._sent.summed_clients), reference=reference
        )

    def _roster(self, graph: NeighbourGraph, client: int) -> Roster:
        holders = graph.holders(client)
        return Roster(
            clients=holders,
            points=tuple(graph.point(holder) for holder in holders),
            sealing_keys=tuple(self._sent.keys[holder].sealing_key for holder in holders),
            masking_keys=tuple(self._sent.keys[holder].masking_key for holder in holders),
            threshold=graph.threshold,
        )

    def _with_enough_holders(self) -> set[int]:
        alive = set(self._sent.shares)
        while True:
            short = {
                client
                for client in alive
                if len(alive & set(self.graph.holders(client))) < self.graph.threshold
            }
            if short == alive:
                raise ThresholdError(
                    "too few clients sent shares of their secrets",
                    have=len(self._sent.shares),
                    need=self.graph.threshold,
                    round_number=self._sent.context.server_round,
                )
            if not short:
                return alive
            alive -= short

    def _mask_request(self, client: int) -> MaskRequest:
        senders = self._sent.mask_peers[client]
        envelopes = []
        for sender in senders:
            reply = self._sent.shares[sender]
            envelopes.append(reply.envelopes[reply.receivers.index(client)])
        return MaskRequest(senders=senders, envelopes=tuple(envelopes))

    def _unmask_request(self, client: int) -> UnmaskRequest:
        itself = (client,) if self.graph.complete else ()
        known = sorted((*self._sent.mask_peers[client], *itself))
        return UnmaskRequest(
            active=tuple(peer for peer in known if peer in self._sent.summed_clients),
            dead=tuple(peer for peer in known if peer not in self._sent.summed_clients),
        )

    def _check_turn(
        self, reply: _Reply, stage: int, invited: Iterable[int], before: Iterable[int]
    ) -> None:
        check_fields(reply)
        client = reply.client
        where = {"round_number": self._sent.context.server_round, "client": client}
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

    def _close_stage(self, stage: int) -> None:
        if self._stage != stage:
            raise ProtocolOrderError(
                f"{_STAGES[stage]} cannot be closed at the stage {_STAGES[self._stage]}",
                round_number=self._sent.context.server_round,
            )
        self._stage += 1

    def _check_enough(self, have: int) -> None:
        check_enough_clients(
            have, self._settings.min_clients, round_number=self._sent.context.server_round
        )
