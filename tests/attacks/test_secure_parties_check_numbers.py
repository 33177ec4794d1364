"""No number of a message costs a party of secure aggregation its memory, its time or its privacy.

Every field of every message is changed to numbers, bytes and lists that no honest party sends. The
party that gets it refuses it by an error of the protocol, or the round still has its exact sum.
"""

import copy
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any, get_type_hints

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.clients.faults import ClientFailureError
from fedsim.clients.secure.channel import SecureChannel
from fedsim.clients.secure.masked_upload import MaskedUpload
from fedsim.core.limits import MAX_ROUNDS
from fedsim.protocol.arrays import to_arrays
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import SECAGG, SHARES, TrainReply, TrainRequest
from fedsim.protocol.secure import from_records, make_query, to_records
from fedsim.secagg import messages
from fedsim.secagg.errors import (
    CapacityError,
    ContextMismatchError,
    DuplicateClientError,
    PublicKeyError,
    SecureAggregationError,
    ThresholdError,
    UnmaskRefusedError,
    WireError,
)
from fedsim.secagg.fields import check_fields, field_rules
from fedsim.secagg.messages import (
    CombineReply,
    Hello,
    HelloReply,
    KeysReply,
    Refusal,
    Roster,
    RoundOffer,
    SharesReply,
    Upload,
)
from fedsim.secagg.payload import MAX_LENGTH, PayloadCodec, TensorLayout, TensorSpec
from fedsim.secagg.settings import EncodingSettings, LastingKeySettings
from fedsim.secagg.shamir import PRIME
from fedsim.secagg.wire import from_record, to_record
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.app import RegisteredNodes
from fedsim.server.secure.aggregator import SecureAggregator
from fedsim.server.secure.helper import Helper
from fedsim.server.secure.masked_sum import MaskedSum
from fedsim.server.secure.opened_sums import NO_OPENED_SUMS
from fedsim.server.secure.rounds import AdditiveRound

PLAN = "digest of the plan"  # of tests/secagg/parties.py
CLIENTS = 4
SECONDS = 2.0  # of the processor, for one message; before, a helper took 25
BYTES = 16 << 20
NUMBERS: list[Any] = [-1, 0, 1, 2**31, 2**62, 2**63, 2**64, 2**300, float("nan"), True, "1", b""]
OWN_CHECKS = {  # fields of numbers and bytes without a rule: what checks them instead
    "HelloReply.public_key": "load_public_key",
    "KeysReply.sealing_key": "load_public_key",
    "KeysReply.masking_key": "load_public_key",
    "Roster.sealing_keys": "load_public_key",
    "Roster.masking_keys": "load_public_key",
    "RoundOffer.helper_keys": "load_public_key",
    "RoundOffer.round_nonce": "SecureUploader compares the context",
    "CombineRequest.envelopes": "a helper rejects the client",
    "CombineRequest.identities": "a helper rejects the client",
    "CombineRequest.signatures": "a helper rejects the client",
    "Refusal.error": "error_by_name",
    "Refusal.message": "from_record cuts it",
}
KINDS = [
    kind for kind in vars(messages).values() if getattr(kind, "__module__", "") == messages.__name__
]
Receive = Callable[[Any], Any]
Deliver = Callable[[Receive, object], Any]


# The cases of the issue ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [-1, 0, MAX_LENGTH + 1, 10**9, 2**62, 2**300])
def test_a_helper_makes_no_vector_of_absurd_length(secure_parties: Any, length: int) -> None:
    """10^9 values took 25 s and 8 GB, and 2^62 was a ValueError that ended the app."""
    scene = secure_parties()
    request = combine_request(scene)
    start = time.process_time()
    with pytest.raises(WireError, match=r"CombineRequest\.length must be a whole number from 1 to"):
        scene.helpers[1].combine(replace(request, length=length))
    assert time.process_time() - start < SECONDS
    assert scene.helpers[1].combine(request).released, "a refusal costs nothing"


def test_a_model_that_every_helper_would_refuse_is_refused_at_the_start(
    secure_parties: Any,
) -> None:
    """The limit of helpers is the limit of all parties, before a client trains."""
    encoder = secure_parties().codec.encoder
    PayloadCodec(encoder, TensorLayout((TensorSpec("w", (MAX_LENGTH - 2,), "float32"),)))
    with pytest.raises(CapacityError, match=r"an upload of 200,001,001 values is above the 200,00"):
        PayloadCodec(encoder, TensorLayout((TensorSpec("w", (MAX_LENGTH - 1,), "float32"),)))


@pytest.mark.parametrize("point", [-1, 0, 7, 2**31, PRIME, 2**300])
@pytest.mark.parametrize("place", [0, 5])
def test_a_client_shares_at_the_points_of_its_graph_only(
    secure_parties: Any, point: int, place: int
) -> None:
    """0 was a ValueError. 2^300 was accepted, and so was the prime: the share is the secret."""
    client, roster = announced(secure_parties(protocol="secagg"))
    points = [*roster.points]
    points[place] = point
    with pytest.raises(WireError, match="point"):
        client.share(replace(roster, points=tuple(points)))
    client.share(roster)


@pytest.mark.parametrize("keys", ["sealing_keys", "masking_keys"])
@pytest.mark.parametrize("key", [b"", bytes(32), b"\1" + bytes(31), bytes(31), b"\7" * 33])
def test_a_client_shares_nothing_for_an_unusable_key(
    secure_parties: Any, keys: str, key: bytes
) -> None:
    """A masking key of zeros was accepted, and the masks failed a stage later."""
    client, roster = announced(secure_parties(protocol="secagg"))
    changed = (*getattr(roster, keys)[:-1], key)
    with pytest.raises(PublicKeyError, match=r"client 5: .* is no usable X25519 public key"):
        client.share(replace(roster, **{keys: changed}))


def test_a_client_that_can_ask_is_not_dead(secure_parties: Any) -> None:
    """A list that calls the client itself dead was answered, with a share of its masking key."""
    one = secure_parties(protocol="secagg").masked()
    for stage in (one.keys, one.shares, one.masks):
        stage()
    request = one.server.unmask_requests()[0]
    with pytest.raises(UnmaskRefusedError, match="calls the client itself dead"):
        one.clients[0].unmask(replace(request, active=(1, 2, 3, 4, 5), dead=(0,)))
    assert one.clients[0].unmask(request).active == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("number", [-1, 0, 2, 7, 2**62, 2**300])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_client_seals_to_the_helpers_of_its_settings_only(
    secure_parties: Any, number: int, pinned: bool
) -> None:
    """Without pins any number was accepted: the envelopes were of a helper that is not there."""
    keys = LastingKeySettings(helper_fingerprints=("0" * 64,) if pinned else ())
    scene = secure_parties()
    offer = replace(scene.leader().offer(scene.keys), helpers=(number,))
    uploader = replace(scene.uploader(0), settings=scene.settings.model_copy(update={"keys": keys}))
    with pytest.raises((ContextMismatchError, WireError), match="helpers"):
        uploader.upload(offer, **scene.arguments(0))


# What the sentence covers beyond its cases ------------------------------------------------


def test_a_client_computes_the_threshold_of_a_complete_graph_itself(secure_parties: Any) -> None:
    """Four of six was accepted where `auto` is more than two thirds, five."""
    client, roster = announced(secure_parties(protocol="secagg"))
    for threshold in (0, 3, 4, 6, 2**20, 2**300):
        with pytest.raises((ThresholdError, WireError), match="must be "):
            client.share(replace(roster, threshold=threshold))
    client.share(roster)


def test_a_roster_has_one_row_for_each_client_of_the_experiment(secure_parties: Any) -> None:
    """Lists of different lengths were a ValueError; a client without end of numbers was a peer."""
    scene = secure_parties(protocol="secagg")
    _, roster = announced(scene)
    own = MaskedUpload(client=0, settings=scene.settings, num_clients=6)
    payload = scene.uploader(0).encode_payload(scene.masked().server.offer(), **scene.arguments(0))
    own.begin(scene.masked().server.offer(), payload)
    changes: dict[str, Any] = {
        "points": roster.points[:-1],
        "sealing_keys": roster.sealing_keys[1:],
        "masking_keys": (),
    }
    for name, value in changes.items():
        with pytest.raises(WireError, match="the roster has 6 clients"):
            own.share(replace(roster, **{name: value}))
    with pytest.raises(WireError, match="names client 6, and clients are below 6"):
        own.share(replace(roster, clients=(0, 1, 2, 3, 4, 6)))
    with pytest.raises(WireError, match="leaves out the client itself"):
        own.share(without_first(roster))


def test_a_helper_counts_the_clients_of_its_own_experiment(secure_parties: Any) -> None:
    """Any number of any clients was summed, also more than fit into the ring."""
    scene = secure_parties(encoding={"max_clients": 6})
    helper = Helper(helper=1, settings=scene.settings, state=scene.helpers[1].state, num_clients=6)
    request = combine_request(scene)
    with pytest.raises(ContextMismatchError, match=r"client 6 was asked, but .* has 6 clients"):
        helper.combine(replace(request, asked=tuple(range(7))))
    with pytest.raises(DuplicateClientError):
        helper.combine(replace(request, asked=(0, *request.asked)))
    small = scene.settings.model_copy(update={"encoding": EncodingSettings(max_clients=5)})
    with pytest.raises(CapacityError, match="6 clients, but the max_clients of helper 1 is 5"):
        Helper(helper=1, settings=small, state=helper.state).combine(request)
    for number in (-1, 0, MAX_ROUNDS + 1, 2**62):
        with pytest.raises(SecureAggregationError):
            helper.combine(replace(request, server_round=number))
    assert helper.combine(request).released


def test_a_round_does_not_wait_for_a_helper_that_sends_no_sum(secure_parties: Any) -> None:
    """The leader asked it for ever. A sum that nobody asked for was added, without a record."""
    scene = secure_parties()
    leader = scene.leader()
    for client in range(6):
        leader.add(scene.upload(leader, client))
    nothing = CombineReply(
        helper=1, round_nonce=leader.offer(scene.keys).round_nonce, released=False
    )
    with pytest.raises(WireError, match="sent no sum where one was asked"):
        leader.take(nothing)
    for rejected in ((77,), (1, 1)):
        with pytest.raises(WireError, match="not in the sum, or one twice"):
            leader.take(replace(nothing, rejected=rejected))
    with pytest.raises(WireError, match=r"CombineReply\.count must be"):
        leader.take(replace(nothing, rejected=(1,), count=2**62))
    assert leader.clients == list(range(6)), "a refused reply changes nothing"
    two = secure_parties(aggregators=3)
    leader = two.leader()
    for client in range(6):
        leader.add(two.upload(leader, client))
    early = two.helpers[1].combine(replace(leader.requests()[1], release=True))
    with pytest.raises(WireError, match="sent a sum where none was asked"):
        leader.take(early)


@pytest.mark.parametrize("key", [b"", bytes(32), b"short"])
def test_an_unusable_key_of_a_helper_ends_the_round_before_clients_train(
    secure_parties: Any, key: bytes
) -> None:
    """The server passed it on, and every client was charged before it refused."""
    scene = secure_parties()
    with pytest.raises(PublicKeyError, match="no usable X25519 public key"):
        taken_keys(scene, replace(scene.keys[1], public_key=key))
    assert taken_keys(scene, scene.keys[1]) == scene.keys


def test_a_client_seals_for_the_round_that_it_was_charged_for(secure_parties: Any) -> None:
    """An offer of round 5 in a request of round 1 was accepted."""
    scene = secure_parties(protocol="secagg")
    channel = channel_of(scene)
    arrays = to_arrays(scene.reference)
    offer = replace(scene.masked().server.offer(), server_round=5)
    request = TrainRequest(1, arrays, to_records(offer)[SECAGG])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ClientFailureError, match="offer is of round 5, and the request of round 1"):
        channel.seal(
            0,
            request,
            TrainReply(scene.reference, 1, None),
            model_digest=offer.model,
            metrics={},
            context=empty_context(),
        )


def test_a_stage_knows_how_many_clients_the_experiment_has(secure_parties: Any) -> None:
    """A roster with clients of no experiment was accepted, up to any number."""
    scene = secure_parties(protocol="secagg")
    channel, context = channel_of(scene), empty_context()
    one = scene.masked()
    one.keys(silent=[0])
    offer, arrays = one.server.offer(), to_arrays(scene.reference)
    request = TrainRequest(1, arrays, to_records(offer)[SECAGG])  # pyright: ignore[reportArgumentType]
    sealed = channel.seal(
        0,
        request,
        TrainReply(scene.reference, 1, None),
        model_digest=offer.model,
        metrics={},
        context=context,
    )
    one.server.take_keys(from_records(KeysReply, sealed.content))
    roster = one.server.rosters()[0]
    for clients, error in (((0, 1, 2, 3, 4, 6), WireError), (roster.clients, None)):
        with server_identity(1):
            query = make_query(SHARES, replace(roster, clients=clients), 1)
            reply = channel.answer(SHARES, 0, query, context)
        if error is None:
            assert from_records(SharesReply, reply.content).receivers == (1, 2, 3, 4, 5)
        else:
            with pytest.raises(error, match="names client 6, and clients are below 6"):
                from_records(SharesReply, reply.content)


def test_a_helper_answers_for_itself_only(secure_parties: Any) -> None:
    """A leader once accepted a reply in the name of helper 1 from any other helper."""
    scene = secure_parties(aggregators=3)
    leader = scene.leader()
    for client in range(6):
        leader.add(scene.upload(leader, client))

    class Swapped:
        def query_with_retries(
            self, _: str, queries: Mapping[int, Any], *__: Any, **___: Any
        ) -> Iterator[tuple[int, object]]:
            yield 2, scene.helpers[1].combine(queries[1])

    swapped: Any = Swapped()
    one = AdditiveRound(leader, scene.keys, swapped, record_opening=lambda _: None)
    with pytest.raises(ContextMismatchError, match="helper 2 sent the message of helper 1"):
        one.open(scene.reference)


@pytest.mark.parametrize("number", [-1, 0, MAX_ROUNDS + 1, 2**62, 2**300])
def test_no_round_of_absurd_number_begins(secure_parties: Any, number: int) -> None:
    """Its number was stored, and later rounds were refused as earlier ones."""
    scene = secure_parties(protocol="secagg")
    one = scene.masked()
    offer = one.server.offer()
    payload = scene.uploader(0).encode_payload(offer, **scene.arguments(0))
    with pytest.raises(WireError, match=r"RoundOffer\.server_round must be a whole number from 1"):
        one.clients[0].begin(replace(offer, server_round=number), payload)
    one.clients[0].begin(offer, payload)


def test_nothing_is_encoded_for_an_unusable_key_of_a_helper(secure_parties: Any) -> None:
    """The update was encoded and shared before the key was looked at."""
    scene = secure_parties()
    offer = scene.leader().offer(scene.keys)
    broken = {**scene.arguments(0), "arrays": {}}
    with pytest.raises(PublicKeyError, match="no usable X25519 public key"):
        scene.uploader(0).upload(replace(offer, helper_keys=(bytes(32),)), **broken)


@pytest.mark.parametrize("share", [b"", bytes(32), bytes(1 << 20)])
def test_a_share_of_a_wrong_length_loses_its_sender_only(secure_parties: Any, share: bytes) -> None:
    """It was taken, and the round was lost with the owner of the secret named for it."""
    one = secure_parties(protocol="secagg").masked()
    for stage in (one.keys, one.shares, one.masks):
        stage()
    replies = {c: one.clients[c].unmask(r) for c, r in one.server.unmask_requests().items()}
    wrong = replace(replies[0], seed_shares=(share, *replies[0].seed_shares[1:]))
    with pytest.raises(WireError, match=r"UnmaskReply\.seed_shares must be 33 bytes"):
        one.server.take_unmask(wrong)
    for reply in list(replies.values())[1:]:
        one.server.take_unmask(reply)
    assert one.open().num_clients == 6


def test_every_number_of_a_message_has_a_rule() -> None:
    without: set[str] = set()
    for kind in KINDS:
        for name, hint in get_type_hints(kind).items():
            arrays_and_flags = hint is bool or "ndarray" in str(hint)
            if not arrays_and_flags and name not in field_rules(kind):
                without.add(f"{kind.__name__}.{name}")
    assert without == set(OWN_CHECKS)


# Every field of every message ---------------------------------------------------------------------


def bad_values(value: Any) -> Iterator[Any]:
    """Yield values of a field that no honest party sends in place of `value`."""
    if isinstance(value, np.ndarray):
        yield from (value[:0], value[:-1], np.concatenate([value, value]), np.zeros_like(value))
        yield from (value.astype(np.float64) * np.nan, value.reshape(1, -1))
        yield value.astype(np.uint8)
    elif isinstance(value, list):
        yield from ([], [*value, *value], value[:-1], value[::-1], value * 1000, 3)
        for place in {0, len(value) - 1} if value else ():
            for entry in bad_values(value[place]):
                yield [*value[:place], entry, *value[place + 1 :]]
    elif isinstance(value, bytes):
        size = len(value)
        yield from (b"", bytes(size), b"\xff" * size, value[:-1], value + b"\0", bytes(1 << 16))
        yield from (bytes(32), 3, float("nan"))
    elif isinstance(value, str):
        yield from ("", "x" * 300, "\ud800", value[:-1], 3)
    else:
        yield from NUMBERS


class Line:
    """Carries messages as records, and changes one of them: the `nth` of a kind."""

    def __init__(self, kind: str, nth: int, change: Mapping[str, Any]) -> None:
        self._kind, self._left, self._change = kind, nth, change

    def __call__(self, receive: Receive, message: object) -> Any:
        if type(message).__name__ != self._kind:
            return receive(changed(message, {}))
        self._left -= 1
        return receive(changed(message, self._change if self._left == -1 else {}))


def changed(message: object, change: Mapping[str, Any]) -> Any:
    """Return a message as its receiver reads it from the wire, with other values of fields."""
    record = to_record(message)
    config: dict[str, Any] = {**record.config}
    arrays = {**record.arrays}
    for name, value in change.items():
        (arrays if name in arrays else config)[name] = value
    return from_record(type(message), config, arrays)


class Recorder:
    """Keeps the first message of each kind, and its receiver as it was before."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Receive, Any]] = {}

    def __call__(self, receive: Receive, message: object) -> Any:
        if type(message).__name__ not in self.seen:
            self.seen[type(message).__name__] = copy.deepcopy(receive), message
        return receive(message)


def shared_round(scene: Any, line: Deliver) -> tuple[list[int], Any]:
    """Run a round with a helper; return the clients in the sum and the sum."""
    helper = Helper(helper=1, settings=scene.settings, num_clients=CLIENTS)
    hello = Hello(run_id="run", params=scene.settings.digest(), min_clients=3)
    scene.keys = {1: line(helper.hello, hello)}
    scene.keys = line(partial(taken_keys, scene), scene.keys[1])
    leader = scene.leader()
    for client in range(CLIENTS):
        upload = partial(scene.uploader(client).upload, **scene.arguments(client))
        try:
            line(leader.add, line(upload, leader.offer(scene.keys)))
        except SecureAggregationError:
            continue  # it is left out
    for _ in range(CLIENTS):
        for request in leader.requests().values():
            line(leader.take, line(helper.combine, request))
    return leader.clients, leader.open(reference=scene.reference)


class OfferedClient(MaskedUpload):
    """A client that gets an offer as `SecureChannel` hands it on."""

    scene: Any

    def offered(self, offer: RoundOffer) -> object:
        encode = self.scene.uploader(self.client).encode_payload
        return self.begin(offer, encode(offer, **self.scene.arguments(self.client)))


def masked_round(scene: Any, line: Deliver) -> tuple[list[int], Any]:
    """Run a round of pairwise masks; a client that refuses or is refused drops out."""
    server = MaskedSum(
        codec=scene.codec, context=scene.context(), settings=scene.settings, clients=range(CLIENTS)
    )
    OfferedClient.scene = scene
    parties = [
        OfferedClient(client=client, settings=scene.settings, num_clients=CLIENTS)
        for client in range(CLIENTS)
    ]

    def stage(sent: Mapping[int, object], answer: str, take: Receive) -> None:
        for client, message in sent.items():
            try:
                line(take, line(getattr(parties[client], answer), message))
            except SecureAggregationError:
                continue  # it drops out

    stage(dict.fromkeys(range(CLIENTS), server.offer()), "offered", server.take_keys)
    stage(server.rosters(), "share", server.take_shares)
    stage(server.mask_requests(), "mask", server.take_masked)
    stage(server.unmask_requests(), "unmask", server.take_unmask)
    return server.clients, server.open(reference=scene.reference)


SHARED = ["Hello", "HelloReply", "RoundOffer", "Upload", "CombineRequest", "CombineReply"]
MASKED = ["RoundOffer", "KeysReply", "Roster", "SharesReply", "MaskRequest", "MaskedReply"]
MASKED += ["UnmaskRequest", "UnmaskReply"]
DOORS = [("additive", kind) for kind in SHARED] + [("secagg", kind) for kind in MASKED]
ROUNDS = {"additive": shared_round, "secagg": masked_round}


@pytest.fixture(scope="module")
def scenes(secure_parties: Any) -> dict[str, Any]:
    return {name: secure_parties(clients=CLIENTS, protocol=name) for name in ROUNDS}


@pytest.fixture(scope="module")
def doors(scenes: dict[str, Any]) -> dict[tuple[str, str], tuple[Receive, Any]]:
    """Every message of an honest round, and its receiver."""
    found: dict[tuple[str, str], tuple[Receive, Any]] = {}
    for name, run in ROUNDS.items():
        recorder = Recorder()
        run(scenes[name], recorder)
        found.update(((name, kind), door) for kind, door in recorder.seen.items())
    return found


def changes_of(message: Any) -> Iterator[tuple[str, Any]]:
    record = to_record(message)
    for each in fields(message):
        value = record.arrays.get(each.name, record.config.get(each.name))
        for bad in bad_values(value):
            yield each.name, bad


def test_every_kind_of_message_comes_to_a_door(doors: Any) -> None:
    assert {kind.__name__ for kind in KINDS} - {"Refusal"} == {kind for _, kind in DOORS}
    assert set(doors) == set(DOORS)


@pytest.mark.parametrize(("name", "kind"), DOORS)
def test_a_changed_field_costs_its_receiver_nothing(doors: Any, name: str, kind: str) -> None:
    """Before: ValueError, UnicodeEncodeError, gigabytes, seconds."""
    receiver, message = doors[name, kind]
    tracemalloc.start()
    try:
        for field, bad in changes_of(message):
            receive, start = copy.deepcopy(receiver), time.process_time()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                received = changed(message, {field: bad})
                receive(received)
            except SecureAggregationError:
                pass
            else:
                check_fields(received)  # what is accepted follows the rules
            assert time.process_time() - start < SECONDS, (field, bad)
            assert tracemalloc.get_traced_memory()[1] - before < BYTES, (field, bad)
    finally:
        tracemalloc.stop()


def check_round(name: str, scene: Any, same_bits: Any, line: Line) -> None:
    """Check that a round ends with an error of the protocol, or with an exact sum."""
    try:
        clients, opened = ROUNDS[name](scene, line)
    except SecureAggregationError:
        return
    assert same_bits(opened, scene.plain(clients))
    assert len(clients) >= 3


@pytest.mark.parametrize(  # a thousand rounds, or each fourth: some values of every field
    "every", [pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("name", "kind"), DOORS)
def test_no_changed_field_changes_the_sum(
    scenes: Any, doors: Any, same_bits: Any, name: str, kind: str, every: int
) -> None:
    for field, bad in islice(changes_of(doors[name, kind][1]), 0, None, every):
        check_round(name, scenes[name], same_bits, Line(kind, 0, {field: bad}))


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_no_two_changed_fields_change_the_sum(
    scenes: Any, doors: Any, same_bits: Any, data: st.DataObject
) -> None:
    name, kind = data.draw(st.sampled_from(DOORS))
    changes = list(changes_of(doors[name, kind][1]))
    two = [changes[data.draw(st.integers(0, len(changes) - 1))] for _ in range(2)]
    nth = data.draw(st.integers(0, CLIENTS - 1))
    check_round(name, scenes[name], same_bits, Line(kind, nth, dict(two)))


def test_a_refusal_is_an_error_of_the_protocol_and_short() -> None:
    record = to_record(Refusal(error="ReplayError", message="x" * (1 << 20)))
    for name in ("error", "message"):
        for bad in bad_values(record.config[name]):
            with pytest.raises(SecureAggregationError) as caught:
                from_record(Upload, {**record.config, name: bad})
            assert len(str(caught.value)) < 3000


# Parties ------------------------------------------------------------------------------------------


def combine_request(scene: Any) -> Any:
    leader = scene.leader()
    for client in range(scene.clients):
        leader.add(scene.upload(leader, client))
    return leader.requests()[1]


def channel_of(scene: Any) -> SecureChannel:
    return SecureChannel(
        scene.settings, scene.codec, tuple(scene.weights.values()), seed=0, plan=PLAN
    )


def empty_context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def announced(scene: Any) -> tuple[MaskedUpload, Roster]:
    """Return client 0 and its honest roster."""
    one = scene.masked()
    one.keys()
    return one.clients[0], one.server.rosters()[0]


def without_first(roster: Roster) -> Roster:
    return Roster(
        clients=roster.clients[1:],
        points=roster.points[1:],
        sealing_keys=roster.sealing_keys[1:],
        masking_keys=roster.masking_keys[1:],
        threshold=4,
    )


def taken_keys(scene: Any, reply: HelloReply) -> Mapping[int, HelloReply]:
    """Return the helpers' keys as the server takes them, when it starts a run."""
    server = SecureAggregator(
        settings=scene.settings,
        codec=scene.codec,
        registered=RegisteredNodes({}, {1: 1}),
        opened_sums=NO_OPENED_SUMS,
        weights=ClientWeights("examples", tuple(scene.weights.values())),
    )
    server._run_id = "run"

    class Channel:
        def query_with_retries(self, *_: Any, **__: Any) -> Iterator[tuple[int, object]]:
            yield 1, reply

    return server._helper_keys(Channel())  # type: ignore[arg-type]
