"""The leader: the exact sum of the survivors, or an error by name."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.secagg.errors import (
    AggregatorUnavailableError,
    AlreadyAnsweredError,
    ContextMismatchError,
    DuplicateClientError,
    EnvelopeError,
    LayoutMismatchError,
    ProtocolOrderError,
    ReplayError,
    SecureAggregationError,
    ShareMismatchError,
    TooFewClientsError,
    WireError,
)
from fedsim.secagg.messages import CombineReply


def filled(scene: Any, clients: int = 6) -> Any:
    """Return a leader with the uploads of the first clients."""
    leader = scene.leader()
    for client in range(clients):
        leader.add(scene.upload(leader, client))
    return leader


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_secure_equals_quantized_bit_for_bit(
    secure_parties: Any, same_bits: Any, data: Any
) -> None:
    """Any survivors, any k from 2 to 5, any order of arrival, both rings, both keystreams."""
    ring = data.draw(st.sampled_from([32, 64]))
    scene = secure_parties(
        aggregators=data.draw(st.integers(2, 5)),
        encoding={
            "ring_bits": ring,
            "guard_bits": 1 if ring == 32 else 8,
            "max_weight": 100,
            "rounding": data.draw(st.sampled_from(["nearest", "stochastic"])),
        },
        prg=data.draw(st.sampled_from(["aes256_ctr", "chacha20"])),
        metrics={"loss": 3.5, "accuracy": 100.0},
        shapes={"w": (data.draw(st.integers(0, 40)), 3), "b": ()},
    )
    survivors = data.draw(st.permutations(range(6)))[: data.draw(st.integers(3, 6))]
    assert same_bits(scene.run(survivors), scene.plain(sorted(survivors)))


def test_the_control_arm_is_the_same_code_without_shares(
    secure_parties: Any, same_bits: Any
) -> None:
    scene = secure_parties(protocol="quantized")
    leader = scene.leader()
    assert leader.is_complete
    assert same_bits(scene.run([4, 1, 0]), scene.plain([0, 1, 4]))


@pytest.mark.parametrize(
    ("aggregators", "moment", "dropped"),
    [*product((2,), ("before train", "in train"), (1, 3, 4)), (5, "in train", 3)],
)
def test_dropouts(
    secure_parties: Any, same_bits: Any, aggregators: int, moment: str, dropped: int
) -> None:
    """Six clients, min_clients 3: the exact sum of the clients that uploaded, or an error."""
    scene = secure_parties(aggregators=aggregators)
    leader = scene.leader()
    for client in range(6):
        if moment == "in train" and client < dropped:
            scene.updates[client]["w"][0] = np.nan  # training failed; the client refuses to upload
            with pytest.raises(SecureAggregationError):
                scene.upload(leader, client)
        elif client >= dropped:
            leader.add(scene.upload(leader, client))
    if dropped == 4:
        with pytest.raises(TooFewClientsError, match="2 clients are left, but min_clients is 3"):
            scene.combine(leader)
        with pytest.raises(TooFewClientsError):
            leader.open(reference=scene.reference)
        return
    scene.combine(leader)
    assert same_bits(leader.open(reference=scene.reference), scene.plain(range(dropped, 6)))


@pytest.mark.parametrize("aggregators", [2, 3])
def test_a_client_whose_envelope_does_not_open_is_taken_out(
    secure_parties: Any,
    same_bits: Any,
    aggregators: int,
) -> None:
    scene = secure_parties(aggregators=aggregators)
    leader = scene.leader()
    for client in range(6):
        upload = scene.upload(leader, client)
        if client in (2, 5):
            *others, last = upload.envelopes
            upload = replace(upload, envelopes=(*others, last[:-1] + bytes([last[-1] ^ 1])))
        leader.add(upload)
    scene.combine(leader)
    assert list(leader.rejected) == [2, 5]
    assert same_bits(leader.open(reference=scene.reference), scene.plain([0, 1, 3, 4]))


def test_a_client_whom_every_helper_rejects_is_taken_out_once(
    secure_parties: Any, same_bits: Any
) -> None:
    scene = secure_parties(aggregators=3)
    leader = scene.leader()
    for client in range(6):
        upload = scene.upload(leader, client)
        if client == 2:
            upload = replace(upload, envelopes=tuple(bytes(len(e)) for e in upload.envelopes))
        leader.add(upload)
    scene.combine(leader)
    assert list(leader.rejected) == [2]
    assert same_bits(leader.open(reference=scene.reference), scene.plain([0, 1, 3, 4, 5]))


@pytest.mark.parametrize("aggregators", [2, 3])
def test_a_helper_cannot_reject_a_client_for_ever(secure_parties: Any, aggregators: int) -> None:
    """Each such reply would be answered by the next request, and the round would never end."""
    scene = secure_parties(aggregators=aggregators)
    leader = filled(scene)
    nonce = leader.offer(scene.keys).round_nonce
    rejection = {"round_nonce": nonce, "released": False, "rejected": (2,)}
    for helper in leader.requests():
        leader.take(CombineReply(helper=helper, **rejection))
    with pytest.raises(WireError, match="rejects a client that is not in the sum"):
        leader.take(CombineReply(helper=1, **rejection))


def test_two_helpers_check_before_either_answers(secure_parties: Any) -> None:
    scene = secure_parties(aggregators=3)
    leader = filled(scene)
    first = leader.requests()
    assert {number: request.release for number, request in first.items()} == {1: False, 2: False}
    for number, request in first.items():
        reply = scene.helpers[number].combine(request)
        assert not reply.released
        assert reply.total.size == 0
        leader.take(reply)
    assert all(request.release for request in leader.requests().values())


def test_a_rejection_after_another_helper_answered_loses_the_round(secure_parties: Any) -> None:
    scene = secure_parties(aggregators=3)
    leader = filled(scene)
    for number, request in leader.requests().items():
        leader.take(scene.helpers[number].combine(request))
    leader.take(scene.helpers[1].combine(leader.requests()[1]))
    late = CombineReply(
        helper=2, round_nonce=leader.offer(scene.keys).round_nonce, released=False, rejected=(1,)
    )
    with pytest.raises(EnvelopeError, match="the round is lost"):
        leader.take(late)


def test_no_client_is_summed_twice_or_uninvited(secure_parties: Any, same_bits: Any) -> None:
    scene = secure_parties()
    leader = filled(scene, 5)
    again = scene.upload(leader, 0)
    with pytest.raises(DuplicateClientError, match="the first upload counts"):
        leader.add(again)
    with pytest.raises(ContextMismatchError, match="not asked"):
        leader.add(replace(again, client=77))
    with pytest.raises(ReplayError):
        leader.add(scene.upload(scene.leader(), 5))
    with pytest.raises(ContextMismatchError, match="another model"):
        leader.add(replace(scene.upload(leader, 5), model="other"))
    with pytest.raises(WireError, match="2 envelopes for 1 helpers"):
        leader.add(replace(scene.upload(leader, 5), envelopes=(b"", b"")))
    with pytest.raises(LayoutMismatchError):
        leader.add(replace(scene.upload(leader, 5), share=np.zeros(3, np.uint64)))
    with pytest.raises(LayoutMismatchError):
        leader.add(replace(scene.upload(leader, 5), share=np.zeros(9, np.uint32)))
    scene.combine(leader)
    assert same_bits(leader.open(reference=scene.reference), scene.plain(range(5)))
    with pytest.raises(ProtocolOrderError):
        leader.add(scene.upload(leader, 5))


def test_every_flipped_bit_of_a_share_is_seen(secure_parties: Any) -> None:
    scene = secure_parties(shapes={"w": (1,)})
    leader = scene.leader()
    upload = scene.upload(leader, 0)
    for bit in range(64 * len(upload.share)):
        share = upload.share.copy()
        share[bit // 64] ^= np.uint64(1 << bit % 64)
        with pytest.raises(ShareMismatchError, match="client 0"):
            leader.add(replace(upload, share=share))
    assert leader.clients == []


def test_every_flipped_bit_of_an_aggregate_is_seen(secure_parties: Any) -> None:
    scene = secure_parties(shapes={"w": (1,)})
    leader = filled(scene, 3)
    reply = scene.helpers[1].combine(leader.requests()[1])
    for bit in range(64 * len(reply.total)):
        total = reply.total.copy()
        total[bit // 64] ^= np.uint64(1 << bit % 64)
        with pytest.raises(ShareMismatchError):
            leader.take(replace(reply, total=total))
    for wrong in ({"count": 4}, {"clients": ""}, {"tag": b""}):
        with pytest.raises(ShareMismatchError):
            leader.take(replace(reply, **wrong))
    with pytest.raises(ReplayError):
        leader.take(replace(reply, round_nonce=bytes(16)))
    with pytest.raises(ContextMismatchError):
        leader.take(replace(reply, helper=2))
    leader.take(reply)
    with pytest.raises(ContextMismatchError):
        leader.take(reply)


def test_a_wrong_seed_never_becomes_a_model(secure_parties: Any) -> None:
    """Helper and leader agree on everything but one seed: the range check finds it."""
    scene = secure_parties()
    leader = scene.leader()
    uploads = [scene.upload(leader, client) for client in range(4)]
    twin = scene.upload(leader, 0)
    leader.add(replace(uploads[0], envelopes=twin.envelopes))
    for upload in uploads[1:]:
        leader.add(upload)
    scene.combine(leader)
    with pytest.raises(ShareMismatchError):
        leader.open(reference=scene.reference)


def test_a_silent_helper_leaves_no_model_and_may_answer_later(
    secure_parties: Any, same_bits: Any
) -> None:
    scene = secure_parties(aggregators=3)
    leader = filled(scene)
    for number, request in leader.requests().items():
        leader.take(scene.helpers[number].combine(request))
    leader.take(scene.helpers[1].combine(leader.requests()[1]))
    with pytest.raises(AggregatorUnavailableError, match=r"helpers \[2\]"):
        leader.open(reference=scene.reference)
    lost = scene.helpers[2].combine(leader.requests()[2])  # this reply is lost in transit
    again = scene.helpers[2].combine(leader.requests()[2])
    np.testing.assert_array_equal(lost.total, again.total)
    leader.take(again)
    assert same_bits(leader.open(reference=scene.reference), scene.plain(range(6)))


@pytest.mark.parametrize("left_out", [0, 4])
def test_differencing_is_refused(secure_parties: Any, left_out: int) -> None:
    """S(U) - S(U without i) would be client i's update; also by a new attempt at the round."""
    scene = secure_parties(clients=5)
    context = scene.context()
    uploads = {}
    first = scene.leader(context=context)
    for client in range(5):
        uploads[client] = scene.upload(first, client)
        first.add(uploads[client])
    scene.combine(first)
    for attempt in (context, replace(context, round_nonce=bytes(16))):
        second = scene.leader(context=attempt)
        for client in set(range(5)) - {left_out}:
            second.add(uploads[client] if attempt is context else scene.upload(second, client))
        with pytest.raises(AlreadyAnsweredError, match="a second sum would reveal"):
            scene.combine(second)
