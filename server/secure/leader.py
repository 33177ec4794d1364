"""The leader: adds up the clients' shares as they come, and opens the sum with the helpers.

A pure state machine; who carries the messages is not its business:

    leader.add(upload)                      for every upload that came
    while not leader.complete:
        for request in leader.requests():   ask request's helper, by its number
            leader.take(reply)
    aggregate = leader.open(reference=model)
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedsim.secagg.additive_info import share_info, total_info
from fedsim.secagg.context import RoundContext, set_digest
from fedsim.secagg.digests import add_checked
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import (
    AggregatorUnavailableError,
    ContextMismatchError,
    DuplicateClientError,
    EnvelopeError,
    LayoutMismatchError,
    ProtocolOrderError,
    ReplayError,
    ShareMismatchError,
    TooFewClientsError,
    WireError,
)
from fedsim.secagg.layout import Arrays
from fedsim.secagg.messages import (
    CombineReply,
    CombineRequest,
    HelloReply,
    RoundOffer,
    Upload,
)
from fedsim.secagg.payload import Aggregate, PayloadCodec
from fedsim.server.secure.archive import MemoryArchive, ShareArchive


class Leader:
    """One round of additive secret sharing, seen from the server.

    Guarantee: `open` returns the exact sum over the surviving clients, or an error is raised; in
    no order of arrival and after no fault another model. Without helpers (`quantized`) the uploads
    are plain, the numbers the same.

    The running sum costs O(d). A client whose envelope a helper rejects must be taken out again, so
    its share is needed once more: `archive` keeps shares until every helper has agreed. In memory
    they are references to replies; `FileArchive` keeps memory at O(d). Not keeping them would let
    a single bad envelope end the round for all.

    Args:
        codec: the payload.
        context: the round; its nonce must be fresh.
        helpers: the helpers' numbers, each ≥ 1; empty for the control arm.
        clients: who was asked.
        min_clients: fewest clients whose sum is opened.
        archive: where shares are kept; None for memory.
    """

    def __init__(
        self,
        *,
        codec: PayloadCodec,
        context: RoundContext,
        helpers: Sequence[int],
        clients: Iterable[int],
        min_clients: int,
        archive: ShareArchive | None = None,
    ) -> None:
        self._codec = codec
        self._context = context
        self._helpers = tuple(helpers)
        self._asked = set(clients)
        self._min_clients = min_clients
        self._archive = MemoryArchive() if archive is None else archive
        self._total: Ring = np.zeros(codec.length, codec.encoder.dtype)
        self._envelopes: dict[int, tuple[bytes, ...]] = {}
        self._agreed: set[int] = set()
        self._answered: set[int] = set()
        self.rejected: dict[int, str] = {}

    @property
    def clients(self) -> list[int]:
        """The clients in the sum so far, in ascending order."""
        return sorted(self._envelopes)

    @property
    def complete(self) -> bool:
        """Whether every helper has answered."""
        return self._answered == set(self._helpers)

    def offer(self, hellos: Mapping[int, HelloReply]) -> RoundOffer:
        """Return what clients need to know, with what each helper said of itself."""
        context = self._context
        said = [hellos[helper] for helper in self._helpers]
        return RoundOffer(
            run_id=context.run_id,
            round_nonce=context.round_nonce,
            server_round=context.server_round,
            layout=context.layout,
            params=context.params,
            model=context.model,
            helpers=self._helpers,
            helper_keys=tuple(one.public_key for one in said),
            helper_identities=tuple(one.identity for one in said),
            helper_signatures=tuple(one.signature for one in said),
        )

    def add(self, upload: Upload) -> None:
        """Add the share of a client; what raises is left out of the sum.

        Raises:
            DuplicateClientError: it came before (the first upload is kept).
            ReplayError, ContextMismatchError: another round, model or client.
            LayoutMismatchError, WireError, ShareMismatchError: malformed or damaged.
        """
        self._check(upload)
        add_checked(
            self._total,
            upload.share,
            share_info(self._context, upload.client),
            upload.tag,
            what="the upload",
            client=upload.client,
        )
        self._envelopes[upload.client] = upload.envelopes
        if self._helpers:
            self._archive.keep(upload.client, upload.share)

    def requests(self) -> dict[int, CombineRequest]:
        """Return what to ask which helper now; nothing when complete.

        With one helper it is the sum. With more, all first say whom they reject: a helper that has
        answered for one set of clients answers for no other.

        Raises:
            TooFewClientsError: fewer than `min_clients` clients are left.
        """
        self._check_enough()
        if len(self._helpers) > 1 and self._agreed != set(self._helpers):
            pending, release = set(self._helpers) - self._agreed, False
        else:
            pending, release = set(self._helpers) - self._answered, True
        return {helper: self._request(helper, release) for helper in sorted(pending)}

    def take(self, reply: CombineReply) -> None:
        """Take a helper's reply: drop the clients it rejects, or add its share of the sum.

        Raises:
            ReplayError, ContextMismatchError, WireError: a reply that does not belong here.
            ShareMismatchError: summed over other clients, or damaged.
            EnvelopeError: a rejection after another helper has answered; the round is lost.
        """
        where = {"round_number": self._context.server_round}
        if reply.round_nonce != self._context.round_nonce:
            raise ReplayError(f"helper {reply.helper} answered another attempt", **where)
        if reply.helper not in self._helpers or reply.helper in self._answered:
            raise ContextMismatchError(f"no answer of helper {reply.helper} is awaited", **where)
        if reply.rejected:
            self._drop(reply)
        if not reply.released:
            self._agreed.add(reply.helper)
            return
        self._check_total(reply)
        add_checked(
            self._total,
            reply.total,
            total_info(self._context, reply.helper),
            reply.tag,
            what=f"the share of helper {reply.helper}",
            client=None,
        )
        self._answered.add(reply.helper)
        if self.complete:
            self._archive.clear()

    def open(self, *, reference: Arrays | None) -> Aggregate:
        """Return the aggregate.

        Args:
            reference: the model that the clients started from; None when they sent parameters.

        Raises:
            AggregatorUnavailableError: a helper has not answered.
            TooFewClientsError, ShareMismatchError, ZeroWeightError: see `PayloadCodec.decode`.
        """
        self._check_enough()
        if not self.complete:
            silent = sorted(set(self._helpers) - self._answered)
            raise AggregatorUnavailableError(
                f"helpers {silent} gave no share of the sum, and all of them are needed; "
                "see that they run, then repeat the round",
                round_number=self._context.server_round,
                helpers=silent,
            )
        return self._codec.decode(self._total, clients=len(self._envelopes), reference=reference)

    def _check(self, upload: Upload) -> None:
        context, client = self._context, upload.client
        where = {"round_number": context.server_round, "client": client}
        if client in self._envelopes:
            raise DuplicateClientError("it has uploaded before; the first upload counts", **where)
        if client not in self._asked:
            raise ContextMismatchError("it was not asked in this round", **where)
        if upload.round_nonce != context.round_nonce:
            raise ReplayError("the upload is of another round or attempt", **where)
        if upload.model != context.model:
            raise ContextMismatchError("it started from another model", **where)
        if self._agreed or self._answered:
            raise ProtocolOrderError("it came after the helpers were asked", **where)
        if len(upload.envelopes) != len(self._helpers):
            raise WireError(
                f"it sent {len(upload.envelopes)} envelopes for {len(self._helpers)} helpers",
                **where,
            )
        _check_vector(upload.share, self._codec, **where)

    def _check_enough(self) -> None:
        have = len(self._envelopes)
        if have < self._min_clients:
            raise TooFewClientsError(
                f"{have} clients are left, but min_clients is {self._min_clients}; "
                "ask more clients, or lower min_clients",
                round_number=self._context.server_round,
                have=have,
                need=self._min_clients,
            )

    def _request(self, helper: int, release: bool) -> CombineRequest:
        context, place = self._context, self._helpers.index(helper)
        return CombineRequest(
            run_id=context.run_id,
            round_nonce=context.round_nonce,
            server_round=context.server_round,
            layout=context.layout,
            model=context.model,
            length=self._codec.length,
            release=release,
            clients=tuple(self.clients),
            envelopes=tuple(self._envelopes[client][place] for client in self.clients),
        )

    def _drop(self, reply: CombineReply) -> None:
        where = {"round_number": self._context.server_round}
        if self._answered or reply.released:
            raise EnvelopeError(
                f"helper {reply.helper} rejects clients {list(reply.rejected)} after a sum with "
                "them was released; the round is lost, repeat it",
                **where,
            )
        for client in reply.rejected:
            if client not in self._envelopes:
                raise WireError(f"helper {reply.helper} rejects unknown client {client}", **where)
            np.subtract(self._total, self._archive.recall(client), out=self._total)
            del self._envelopes[client]
            self.rejected[client] = f"helper {reply.helper} could not open its envelope"

    def _check_total(self, reply: CombineReply) -> None:
        where = {"round_number": self._context.server_round}
        agrees = reply.clients == set_digest(self.clients) and reply.count == len(self.clients)
        if not agrees:
            raise ShareMismatchError(
                f"helper {reply.helper} summed {reply.count} clients, but the {len(self.clients)} "
                "of the leader are others; repeat the round",
                **where,
            )
        _check_vector(reply.total, self._codec, **where)


def _check_vector(
    vector: Ring, codec: PayloadCodec, *, round_number: int, client: int | None = None
) -> None:
    if vector.dtype != codec.encoder.dtype or vector.shape != (codec.length,):
        raise LayoutMismatchError(
            f"expected {codec.encoder.dtype}[{codec.length}], got "
            f"{vector.dtype}{list(vector.shape)}; all parties must use the same settings and model",
            round_number=round_number,
            client=client,
        )
