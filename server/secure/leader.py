"""Server side of additive secret sharing: it adds the clients' shares and computes the sum.

The server acts as the leader, with share number 0; the helpers have the other shares. The leader is
a state machine, and the caller transports the messages:

    leader.add(upload)                                     for every upload
    while not leader.is_complete:
        for helper, request in leader.requests().items():  send the request to the helper
            leader.take(reply)
    decoded = leader.open(reference=model)
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedsim.secagg.additive import leader_share_info, total_info
from fedsim.secagg.context import RoundContext, set_digest
from fedsim.secagg.digests import verify_and_add
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    AggregatorUnavailableError,
    ContextMismatchError,
    DuplicateClientError,
    EnvelopeError,
    ProtocolOrderError,
    ReplayError,
    ShareMismatchError,
    WireError,
    check_enough_clients,
)
from fedsim.secagg.fields import check_fields
from fedsim.secagg.messages import CombineReply, CombineRequest, HelloReply, RoundOffer, Upload
from fedsim.secagg.payload import DecodedSum, NamedArrays, PayloadCodec


class Leader:
    """State machine for one round of additive secret sharing on the server.

    Guarantee: `open` returns the exact sum over the clients that did not drop out, or raises. The
    order of arrival and faults never change the sum. Without helpers (protocol `quantized`) the
    server sees the uploads, and the sums are the same.

    If a helper rejects a client's envelope (its encrypted share), the leader subtracts that
    client's share again. So one bad envelope does not end the round. For this, the leader keeps all
    clients' shares until every helper has sent its sum.

    Args:
        codec: the encoder of updates as ring elements (integers modulo a power of 2).
        context: the run, round, model and fresh nonce to which all messages are bound.
        helpers: the numbers of the helpers, each ≥ 1; empty for the protocol `quantized`.
        clients: the numbers of the clients that are asked.
        min_clients: the smallest number of clients that a sum may have.
    """

    def __init__(
        self,
        *,
        codec: PayloadCodec,
        context: RoundContext,
        helpers: Sequence[int],
        clients: Iterable[int],
        min_clients: int,
    ) -> None:
        self._codec = codec
        self._context = context
        self._helpers = tuple(helpers)
        self._invited_clients = set(clients)
        self._min_clients = min_clients
        self._shares: dict[int, Ring] = {}
        self._total: Ring = np.zeros(codec.length, codec.encoder.dtype)
        self._envelopes: dict[int, tuple[bytes, ...]] = {}
        self._signed: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}
        self._agreed_helpers: set[int] = set()
        self._summed_helpers: set[int] = set()
        self.rejected: dict[int, str] = {}

    @property
    def clients(self) -> list[int]:
        """Clients in the sum so far, in ascending order."""
        return sorted(self._envelopes)

    @property
    def is_complete(self) -> bool:
        """Whether every helper has sent its share of the sum."""
        return self._summed_helpers == set(self._helpers)

    def offer(self, hellos: Mapping[int, HelloReply]) -> RoundOffer:
        """Return the parameters of the round (the offer), which train requests carry.

        Args:
            hellos: each helper's reply to the first message of the run, by helper number.
        """
        replies = [hellos[helper] for helper in self._helpers]
        return RoundOffer(
            **vars(self._context),
            helpers=self._helpers,
            helper_keys=tuple(reply.public_key for reply in replies),
            helper_identities=tuple(reply.identity for reply in replies),
            helper_signatures=tuple(reply.signature for reply in replies),
        )

    def add(self, upload: Upload) -> None:
        """Add a client's share to the sum; if this raises, the upload is not in the sum.

        Raises:
            DuplicateClientError: the client has uploaded before (the first upload counts).
            ReplayError, ContextMismatchError: the upload is for another round or model, or from a
                client that was not asked.
            LayoutMismatchError, WireError, ShareMismatchError: the upload is malformed or damaged.
        """
        self._check(upload)
        verify_and_add(
            self._total,
            upload.share,
            leader_share_info(self._context, upload.client),
            upload.tag,
            name="the upload",
            client=upload.client,
        )
        self._envelopes[upload.client] = upload.envelopes
        unsigned = (b"",) * len(self._helpers)
        self._signed[upload.client] = upload.identity, upload.signatures or unsigned
        if self._helpers:
            self._shares[upload.client] = upload.share

    def requests(self) -> dict[int, CombineRequest]:
        """Return the next request to each helper, by helper number; empty if the round is complete.

        A single helper is asked for its sum at once. Several helpers first list the envelopes that
        they cannot decrypt. A helper releases only one sum, so all must first agree on the clients.

        Raises:
            TooFewClientsError: fewer than `min_clients` clients are left.
        """
        self._check_enough()
        release = self._asks_release
        answered = self._summed_helpers if release else self._agreed_helpers
        pending = sorted(set(self._helpers) - answered)
        return {helper: self._request(helper, release) for helper in pending}

    def take(self, reply: CombineReply) -> None:
        """Process a helper's reply: drop the clients that it rejects, or add its share of the sum.

        Raises:
            ReplayError, ContextMismatchError: the reply is from another attempt or helper.
            WireError: a field is malformed, or the reply does not fit the request.
            ShareMismatchError: the sum is damaged, or is the sum of other clients.
            EnvelopeError: the helper rejects a client after another released its sum. The round
                fails.
        """
        check_fields(reply)
        where = {"round_number": self._context.server_round}
        if reply.round_nonce != self._context.round_nonce:
            raise ReplayError(f"helper {reply.helper} answered another attempt", **where)
        if reply.helper not in self._helpers or reply.helper in self._summed_helpers:
            raise ContextMismatchError(f"helper {reply.helper} was not asked now", **where)
        if reply.rejected:
            self._drop_rejected(reply)
        elif reply.released != self._asks_release:
            sent, asked = ("a sum", "none") if reply.released else ("no sum", "one")
            raise WireError(f"helper {reply.helper} sent {sent} where {asked} was asked", **where)
        if not reply.released:
            self._agreed_helpers.add(reply.helper)
            return
        self._check_total(reply)
        verify_and_add(
            self._total,
            reply.total,
            total_info(self._context, reply.helper),
            reply.tag,
            name=f"the share of helper {reply.helper}",
            client=None,
        )
        self._summed_helpers.add(reply.helper)
        if self.is_complete:
            self._shares.clear()

    def open(self, *, reference: NamedArrays | None) -> DecodedSum:
        """Return the decoded sum of the clients' updates.

        Args:
            reference: the model to which decoded changes are added; None if clients sent models.

        Raises:
            AggregatorUnavailableError: a helper has not sent its share.
            TooFewClientsError, ShareMismatchError, ZeroWeightError: the sum cannot be decoded;
                `PayloadCodec.decode` says when.
        """
        self._check_enough()
        if not self.is_complete:
            silent = sorted(set(self._helpers) - self._summed_helpers)
            raise AggregatorUnavailableError(
                f"helpers {silent} gave no share of the sum, and all of them are needed; "
                "check that they run, then repeat the round",
                round_number=self._context.server_round,
            )
        return self._codec.decode(
            self._total, num_clients=len(self._envelopes), reference=reference
        )

    @property
    def _asks_release(self) -> bool:
        """Whether the next requests ask for sums, and not only for lists of bad envelopes."""
        return len(self._helpers) == 1 or self._agreed_helpers == set(self._helpers)

    def _check(self, upload: Upload) -> None:
        context, client = self._context, upload.client
        where = {"round_number": context.server_round, "client": client}
        if client in self._envelopes:
            raise DuplicateClientError("it has uploaded before; the first upload counts", **where)
        if client not in self._invited_clients:
            raise ContextMismatchError("it was not asked in this round", **where)
        if upload.round_nonce != context.round_nonce:
            raise ReplayError("the upload is of another round or attempt", **where)
        if upload.model != context.model:
            raise ContextMismatchError("it started from another model", **where)
        if self._agreed_helpers or self._summed_helpers:
            raise ProtocolOrderError("it came after the helpers were asked", **where)
        if len(upload.envelopes) != len(self._helpers):
            raise WireError(
                f"it sent {len(upload.envelopes)} envelopes for {len(self._helpers)} helpers",
                **where,
            )
        if len(upload.signatures) not in (0, len(self._helpers)):
            raise WireError(
                f"it sent {len(upload.signatures)} signatures for {len(self._helpers)} helpers",
                **where,
            )
        check_fields(upload)
        self._codec.check_vector(upload.share, **where)

    def _check_enough(self) -> None:
        check_enough_clients(
            len(self._envelopes), self._min_clients, round_number=self._context.server_round
        )

    def _request(self, helper: int, release: bool) -> CombineRequest:
        context, place = self._context, self._helpers.index(helper)
        signed = [self._signed[client] for client in self.clients]
        keyed = any(identity for identity, _ in signed)
        return CombineRequest(
            run_id=context.run_id,
            round_nonce=context.round_nonce,
            server_round=context.server_round,
            layout=context.layout,
            model=context.model,
            asked=tuple(sorted(self._invited_clients)),
            plan=context.plan,
            length=self._codec.length,
            release=release,
            clients=tuple(self.clients),
            envelopes=tuple(self._envelopes[client][place] for client in self.clients),
            identities=tuple(identity for identity, _ in signed) if keyed else (),
            signatures=tuple(signatures[place] for _, signatures in signed) if keyed else (),
        )

    def _drop_rejected(self, reply: CombineReply) -> None:
        where = {"round_number": self._context.server_round}
        if self._summed_helpers or reply.released:
            raise EnvelopeError(
                f"helper {reply.helper} rejects clients {list(reply.rejected)} after a sum with "
                "them was released; the round is lost, repeat it",
                **where,
            )
        # Where sums are asked, the other helpers' rejections came before: a round must end.
        asked = self._envelopes.keys() | (set() if self._asks_release else self.rejected.keys())
        known = set(reply.rejected) & asked
        if len(known) != len(reply.rejected):
            raise WireError(
                f"helper {reply.helper} rejects a client that is not in the sum, or one twice",
                **where,
            )
        for client in reply.rejected:
            if client not in self._envelopes:  # another helper has rejected it, too
                continue
            np.subtract(self._total, self._shares[client], out=self._total)
            del self._envelopes[client]
            self.rejected[client] = (
                f"helper {reply.helper} could not open its envelope, or knows another key of it"
            )

    def _check_total(self, reply: CombineReply) -> None:
        where = {"round_number": self._context.server_round}
        agrees = reply.clients == set_digest(self.clients) and reply.count == len(self.clients)
        if not agrees:
            raise ShareMismatchError(
                f"helper {reply.helper} summed {reply.count} clients, which are not the "
                f"{len(self.clients)} clients of the leader; repeat the round",
                **where,
            )
        self._codec.check_vector(reply.total, **where)
