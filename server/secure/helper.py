"""A helper of additive secret sharing, which releases one sum of client shares per round.

Clients send each helper a random seed, encrypted with the helper's key; the seed expands to the
helper's share of the update. The helper is a state machine; its node sends and receives the
messages. The helper's state is a dictionary of plain values, which the node stores.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedsim.core.limits import MAX_CLIENTS
from fedsim.secagg.additive import expand_into, seed_info, total_info
from fedsim.secagg.context import RoundContext, pack, set_digest
from fedsim.secagg.digests import vector_tag
from fedsim.secagg.errors import (
    AlreadyAnsweredError,
    CapacityError,
    ContextMismatchError,
    DuplicateClientError,
    EnvelopeError,
    PublicKeyError,
    ReplayError,
    TooFewClientsError,
    WireError,
)
from fedsim.secagg.fields import check_fields
from fedsim.secagg.hpke import SealingKey
from fedsim.secagg.identity import IdentityKey, is_from_client
from fedsim.secagg.masks import SEED_BYTES, SeedExpander
from fedsim.secagg.messages import CombineReply, CombineRequest, Hello, HelloReply
from fedsim.secagg.settings import SecureAggregationSettings


@dataclass(frozen=True)
class HelperState:
    """Stored state of a helper, which `fedsim.secagg.wire` converts to a record.

    Attributes:
        run_id: the name of the run; "" before the first hello.
        private_key: the private key of the run, to which clients encrypt, 32 bytes.
        min_clients: the fewest clients in a sum, the larger of the helper's and the server's value.
        answered: the last round whose sum was released; 0 before the first release.
        question: the digest of the request that the sum of round `answered` answered.
        past: the names of earlier runs, which are refused because their answers are not stored.
    """

    run_id: str = ""
    private_key: bytes = b""
    min_clients: int = 0
    answered: int = 0
    question: str = ""
    past: tuple[str, ...] = ()


@dataclass(frozen=True)
class HelperRelease:
    """Record of a sum that a helper is about to release.

    Attributes:
        run_id: the name of the run.
        server_round: the round, ≥ 1.
        question: the digest of the request that the sum answers.
    """

    run_id: str
    server_round: int
    question: str


def _discard(release: HelperRelease) -> None:
    """Keep no record."""


class Helper:
    """A helper: it adds up the shares that clients encrypt to it and releases one sum per round.

    Guarantee: at most one sum per round leaves the helper, and never a sum of fewer than
    `min_clients` clients. An encrypted share (envelope) counts only if it was made for exactly this
    run, round, model, layout, set of asked clients and privacy plan. So an envelope enters at most
    one sum. The same request gets the same answer. Another request for the same round is refused,
    because the difference of two sums reveals single updates. Requests for earlier rounds are
    refused. The helper sees the participants and their seeds, which depend on no update.

    With `keys.client_fingerprints` each envelope needs a signature by the known key of its client.
    Without these signatures, the server could invent clients and their envelopes. It could then
    learn a sum in which only one client is real.

    Args:
        helper: the number of this helper, ≥ 1 (the server is number 0).
        settings: the settings of the helper's own file; the server can only raise `min_clients`.
        state: the stored state; None before the first run.
        identity: the long-term signing key, which signs the helper's key of every run. Clients can
            check its fingerprint. None for a helper without a long-term key.
        record: function that is called before a sum is released; it returns when a record of the
            release is on disk. It raises SecureAggregationError if another sum of this round, or a
            sum of a later round, was released before.
        num_clients: the number of clients in the helper's experiment, numbered from 0.
    """

    def __init__(
        self,
        *,
        helper: int,
        settings: SecureAggregationSettings,
        state: HelperState | None = None,
        identity: IdentityKey | None = None,
        record: Callable[[HelperRelease], None] = _discard,
        num_clients: int = MAX_CLIENTS,
    ) -> None:
        self.helper = helper
        self.state = state or HelperState()
        self._settings = settings
        self._identity = identity
        self._record = record
        self._num_clients = num_clients

    def hello(self, hello: Hello) -> HelloReply:
        """Answer the first message of a run: begin the run if it is new, and return its public key.

        Every run has a new key for encryption, even if a long-term key signs it. So a helper that
        lost its state cannot decrypt earlier envelopes, and an ended run cannot resume.

        Raises:
            WireError: a field of the message is malformed.
            ReplayError: the run has ended.
            ContextMismatchError: the server's parameters differ from the helper's.
            PublicKeyError: the helper's key does not have the fingerprint in the helper's settings.
        """
        check_fields(hello)
        self._check_pin()
        if hello.params != self._settings.digest():
            raise ContextMismatchError(
                f"helper {self.helper} has parameters {self._settings.digest()[:12]}, the leader "
                f"{hello.params[:12]}; give both the same secure_aggregation section"
            )
        if not hello.run_id or hello.run_id in self.state.past:
            raise ReplayError(
                f"run {hello.run_id!r} of helper {self.helper} has ended; use another run name"
            )
        if hello.run_id != self.state.run_id:
            over = (self.state.run_id,) if self.state.run_id else ()
            self.state = HelperState(
                run_id=hello.run_id,
                private_key=SealingKey.generate().to_bytes(),
                min_clients=max(hello.min_clients, self._settings.min_clients),
                past=(*self.state.past, *over),
            )
        key = SealingKey.from_bytes(self.state.private_key)
        reply = HelloReply(run_id=hello.run_id, helper=self.helper, public_key=key.public)
        if self._identity is None:
            return reply
        signature = self._identity.sign(
            run_id=hello.run_id, helper=self.helper, params=hello.params, public_key=key.public
        )
        return replace(reply, identity=self._identity.public, signature=signature)

    def combine(self, request: CombineRequest) -> CombineReply:
        """Answer a request with this helper's share of the sum, or with the rejected clients.

        The answer has no share if a client is rejected, or if the request has `release` = False.

        Raises:
            ReplayError: the request is for another run, or for an earlier round.
            AlreadyAnsweredError: a different request for this round was answered before.
            TooFewClientsError, CapacityError: there are fewer clients than `min_clients`, or more
                than `max_clients`.
            DuplicateClientError: a client occurs twice.
            ContextMismatchError: a client was not asked, or is not in the helper's experiment.
            WireError: a field of the message is malformed, or lists differ in length.
        """
        self._check(request)
        self._check_clients(request)
        question = _digest(request)
        if request.release:
            self._check_unanswered(request, question)
        seeds, rejected = self._open_envelopes(request)
        if rejected or not request.release:
            return CombineReply(
                helper=self.helper,
                round_nonce=request.round_nonce,
                released=False,
                rejected=tuple(rejected),
            )
        self._record(HelperRelease(request.run_id, request.server_round, question))
        self.state = replace(self.state, answered=request.server_round, question=question)
        return self._release(request, seeds)

    def _check_pin(self) -> None:
        """Check the helper's pinned key before the run: every client would refuse another key."""
        pins = self._settings.keys.helper_fingerprints
        if not pins:
            return
        if self._identity is None:
            raise PublicKeyError(
                f"helper {self.helper} has no lasting key, but keys.helper_fingerprints pins "
                f"{pins[self.helper - 1][:16]}...; give it the file of that key"
            )
        if self._identity.fingerprint != pins[self.helper - 1]:
            raise PublicKeyError(
                f"the lasting key of helper {self.helper} has the fingerprint "
                f"{self._identity.fingerprint}, but keys.helper_fingerprints pins "
                f"{pins[self.helper - 1]}; give it the other file, or correct the pin everywhere"
            )

    def _check(self, request: CombineRequest) -> None:
        where = {"round_number": request.server_round}
        if not self.state.run_id or request.run_id != self.state.run_id:
            raise ReplayError(
                f"helper {self.helper} is in run {self.state.run_id!r}, the request in "
                f"{request.run_id!r}; send a Hello first",
                **where,
            )
        if request.server_round < max(self.state.answered, 1):
            raise ReplayError(
                f"helper {self.helper} has answered round {self.state.answered} and refuses "
                "earlier ones; continue with a later round",
                **where,
            )
        check_fields(request)
        if len(request.clients) != len(request.envelopes):
            raise WireError(
                f"{len(request.clients)} clients and {len(request.envelopes)} envelopes; each "
                "client needs one envelope",
                **where,
            )
        keyed = len(request.clients) if self._settings.keys.client_fingerprints else 0
        if {len(request.identities), len(request.signatures)} - {keyed, len(request.clients)}:
            raise WireError(
                f"{len(request.clients)} clients, {len(request.identities)} keys and "
                f"{len(request.signatures)} signatures; where keys.client_fingerprints pins keys, "
                "each client needs both",
                **where,
            )

    def _check_clients(self, request: CombineRequest) -> None:
        where = {"round_number": request.server_round}
        if not set(request.clients) <= set(request.asked):
            raise ContextMismatchError("a client of the sum was not asked in the round", **where)
        for numbers in (request.asked, request.clients):
            if len(set(numbers)) != len(numbers):
                raise DuplicateClientError("a client occurs twice in one request", **where)
        if max(request.asked, default=0) >= self._num_clients:
            raise ContextMismatchError(
                f"client {max(request.asked)} was asked, but the experiment of helper "
                f"{self.helper} has {self._num_clients} clients, numbered from 0",
                **where,
            )
        most = self._settings.encoding.max_clients
        if most != "auto" and len(request.clients) > most:
            raise CapacityError(
                f"{len(request.clients)} clients, but the max_clients of helper {self.helper} is "
                f"{most}; their sum may not fit into the ring",
                **where,
            )
        if len(request.clients) < self.state.min_clients:
            raise TooFewClientsError(
                f"{len(request.clients)} clients, but helper {self.helper} opens no sum of fewer "
                f"than {self.state.min_clients}; wait for more clients, or lower min_clients in "
                "the helper's own settings",
                **where,
            )

    def _check_unanswered(self, request: CombineRequest, question: str) -> None:
        if request.server_round == self.state.answered and question != self.state.question:
            raise AlreadyAnsweredError(
                f"helper {self.helper} has answered this round for another set of clients, model "
                "or attempt; a second sum would reveal single updates. Continue with a later round",
                round_number=request.server_round,
            )

    def _open_envelopes(self, request: CombineRequest) -> tuple[list[bytes], list[int]]:
        key = SealingKey.from_bytes(self.state.private_key)
        seeds: list[bytes] = []
        rejected: list[int] = []
        infos = self._infos(request)
        for place, (client, info) in enumerate(zip(request.clients, infos, strict=True)):
            try:
                seed = key.open(request.envelopes[place], info=info, client=client)
            except EnvelopeError:
                seed = b""
            if not self._is_known(request, place, info):
                seed = b""
            if len(seed) == SEED_BYTES:
                seeds.append(seed)
            else:
                rejected.append(client)
        return seeds, rejected

    def _is_known(self, request: CombineRequest, place: int, info: bytes) -> bool:
        """Whether an envelope is signed by its client's pinned key; true without pinned keys."""
        pins, client = self._settings.keys.client_fingerprints, request.clients[place]
        if not pins:
            return True
        return 0 <= client < len(pins) and is_from_client(
            request.envelopes[place],
            info=info,
            identity=request.identities[place],
            signature=request.signatures[place],
            pin=pins[client],
        )

    def _release(self, request: CombineRequest, seeds: list[bytes]) -> CombineReply:
        dtype = np.uint64 if self._settings.encoding.ring_bits == 64 else np.uint32
        total = np.zeros(request.length, dtype)
        expand_into(total, seeds, self._infos(request), SeedExpander(self._settings.prg))
        context = self._context(request)
        return CombineReply(
            helper=self.helper,
            round_nonce=request.round_nonce,
            released=True,
            count=len(seeds),
            clients=set_digest(request.clients),
            total=total,
            tag=vector_tag(total, total_info(context, self.helper)),
        )

    def _infos(self, request: CombineRequest) -> list[bytes]:
        context = self._context(request)
        return [seed_info(context, client, self.helper) for client in request.clients]

    def _context(self, request: CombineRequest) -> RoundContext:
        return RoundContext(
            run_id=self.state.run_id,
            round_nonce=request.round_nonce,
            server_round=request.server_round,
            layout=request.layout,
            params=self._settings.digest(),
            model=request.model,
            asked=set_digest(request.asked),
            plan=request.plan,
        )


def _digest(request: CombineRequest) -> str:
    """Return the SHA-256 of all inputs of the released sum, independent of the order of clients."""
    fields = [request.round_nonce, request.layout.encode(), request.model.encode()]
    fields += [str(request.length).encode(), set_digest(request.asked).encode()]
    fields.append(request.plan.encode())
    for client, envelope in sorted(zip(request.clients, request.envelopes, strict=True)):
        fields += [str(client).encode(), envelope]
    return hashlib.sha256(pack(fields)).hexdigest()
