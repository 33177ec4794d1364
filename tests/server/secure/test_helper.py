"""The helper releases at most one sum a round, of enough clients, for any requests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fedsim.secagg.errors import (
    AlreadyAnsweredError,
    ContextMismatchError,
    DuplicateClientError,
    PublicKeyError,
    ReplayError,
    SecureAggregationError,
    TooFewClientsError,
    WireError,
)
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.messages import CombineReply, CombineRequest, Hello
from fedsim.secagg.settings import EncodingSettings, LastingKeySettings, SecureAggregationSettings
from fedsim.secagg.wire import from_record, to_record
from fedsim.server.secure.helper import Helper, HelperState


def request_of(scene: Any, clients: Any, server_round: int = 1) -> CombineRequest:
    leader = scene.leader(server_round)
    for client in clients:
        leader.add(scene.upload(leader, client))
    return leader.requests()[1]


def test_the_same_question_has_the_same_answer(secure_parties: Any) -> None:
    scene = secure_parties()
    request = request_of(scene, range(6))
    one = scene.helpers[1].combine(request)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = replace(
        request,
        clients=tuple(order),
        envelopes=tuple(request.envelopes[client] for client in order),
    )
    other = scene.helpers[1].combine(shuffled)
    np.testing.assert_array_equal(one.total, other.total)
    assert one.tag == other.tag


def test_the_answer_survives_a_restart(secure_parties: Any) -> None:
    scene = secure_parties()
    request = request_of(scene, range(6))
    first = scene.helpers[1].combine(request)
    record = to_record(scene.helpers[1].state).config
    assert {type(value) for value in record.values()} <= {str, int, bytes, list}
    revived = Helper(helper=1, settings=scene.settings, state=from_record(HelperState, record))
    np.testing.assert_array_equal(revived.combine(request).total, first.total)
    with pytest.raises(AlreadyAnsweredError):
        revived.combine(
            replace(request, clients=request.clients[1:], envelopes=request.envelopes[1:])
        )
    with pytest.raises(WireError, match="HelperState"):
        from_record(HelperState, {})


def test_each_part_of_a_question_counts(secure_parties: Any) -> None:
    scene = secure_parties()
    request = request_of(scene, range(6))
    scene.helpers[1].combine(request)
    others = (
        {"round_nonce": bytes(16)},
        {"model": "another"},
        {"layout": "another"},
        {"plan": "another"},
        {"asked": tuple(range(7))},
        {"length": request.length + 1},
        {"clients": request.clients[:-1], "envelopes": request.envelopes[:-1]},
        {"envelopes": request.envelopes[::-1]},
    )
    for change in others:
        with pytest.raises(AlreadyAnsweredError):
            scene.helpers[1].combine(replace(request, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"},
        {"layout": "another"},
        {"server_round": 2},
        {"plan": "another"},
        {"asked": tuple(range(7))},
    ],
)
def test_envelopes_do_not_open_in_another_context(
    secure_parties: Any, change: dict[str, Any]
) -> None:
    scene = secure_parties()
    reply = scene.helpers[1].combine(replace(request_of(scene, range(6)), **change))
    assert not reply.released
    assert reply.rejected == tuple(range(6))
    assert scene.helpers[1].state.answered == 0


def test_the_leader_cannot_lower_min_clients(secure_parties: Any) -> None:
    scene = secure_parties(min_clients=4)
    request = request_of(scene, range(4))
    fewer = replace(request, clients=request.clients[:3], envelopes=request.envelopes[:3])
    with pytest.raises(TooFewClientsError, match=r"fewer than 4.*in the helper's own settings"):
        scene.helpers[1].combine(fewer)
    raised = Helper(helper=1, settings=scene.settings)
    scene.hello(raised, min_clients=5)
    assert raised.state.min_clients == 5


def test_malformed_requests_are_refused(secure_parties: Any) -> None:
    scene = secure_parties()
    request = request_of(scene, range(6))
    helper = scene.helpers[1]
    for change, error in (
        ({"clients": (0, 0, 1, 2, 3, 4)}, DuplicateClientError),
        ({"envelopes": request.envelopes[1:]}, WireError),
        ({"length": 0}, WireError),
        ({"run_id": "other"}, ReplayError),
        ({"server_round": 0}, ReplayError),
    ):
        with pytest.raises(error):
            helper.combine(replace(request, **change))
    with pytest.raises(ReplayError, match="send a Hello first"):
        Helper(helper=1, settings=scene.settings).combine(replace(request, run_id=""))


def test_rounds_do_not_go_back(secure_parties: Any) -> None:
    scene = secure_parties()
    early = request_of(scene, range(6), server_round=1)
    scene.helpers[1].combine(request_of(scene, range(6), server_round=2))
    with pytest.raises(ReplayError, match="refuses earlier ones"):
        scene.helpers[1].combine(early)


def test_a_new_run_has_a_new_key_and_other_settings_are_refused(secure_parties: Any) -> None:
    scene = secure_parties()
    request = request_of(scene, range(6))
    helper = scene.helpers[1]
    key = scene.keys[1]
    assert scene.hello(helper) == key
    assert scene.hello(helper, run_id="second") != key
    with pytest.raises(ReplayError):
        helper.combine(request)
    assert helper.combine(replace(request, run_id="second")).rejected == request.clients
    for over in ("run", ""):
        with pytest.raises(ReplayError, match="has ended"):
            scene.hello(helper, run_id=over)
    other = SecureAggregationSettings(encoding=EncodingSettings(value_bound=1.0)).digest()
    with pytest.raises(ContextMismatchError, match="give both the same"):
        helper.hello(Hello(run_id="run", params=other, min_clients=2))


def test_a_lasting_key_does_not_bring_back_the_answers_of_a_run(secure_parties: Any) -> None:
    """A helper with a pinned key that lost its state must not release a second sum."""
    scene = secure_parties()
    identity = IdentityKey.generate()
    helper = Helper(helper=1, settings=scene.settings, identity=identity)
    scene.helpers, scene.keys = {1: helper}, {1: scene.hello(helper)}
    request = request_of(scene, range(6))
    helper.combine(request)
    fewer = replace(request, clients=request.clients[1:], envelopes=request.envelopes[1:])
    second = scene.hello(helper, run_id="second")
    assert second.identity == scene.keys[1].identity == identity.public
    assert second.public_key != scene.keys[1].public_key
    with pytest.raises(ReplayError, match="has ended"):
        scene.hello(helper)
    assert helper.combine(replace(fewer, run_id="second")).rejected == fewer.clients
    state = from_record(HelperState, to_record(helper.state).config)
    revived = Helper(helper=1, settings=scene.settings, state=state, identity=identity)
    with pytest.raises(ReplayError, match="has ended"):
        scene.hello(revived)
    forgetful = Helper(helper=1, settings=scene.settings, identity=identity)  # its disk was lost
    scene.hello(forgetful)
    assert forgetful.combine(fewer).rejected == fewer.clients


def test_a_helper_that_is_not_the_pinned_one_says_so_at_once() -> None:
    keys = IdentityKey.generate(), IdentityKey.generate()
    pins = [key.fingerprint for key in keys]
    settings = SecureAggregationSettings(
        aggregators=3, keys=LastingKeySettings(helper_fingerprints=tuple(pins))
    )
    hello = Hello(run_id="run", params=settings.digest(), min_clients=2)
    for number, key in enumerate(keys, start=1):
        Helper(helper=number, settings=settings, identity=key).hello(hello)
    with pytest.raises(PublicKeyError, match=r"helper 2 has no lasting key"):
        Helper(helper=2, settings=settings).hello(hello)
    with pytest.raises(PublicKeyError, match=rf"fingerprint {pins[0]}, but .* pins {pins[1]}"):
        Helper(helper=2, settings=settings, identity=keys[0]).hello(hello)


class HelperUnderAttack(RuleBasedStateMachine):
    """Any sequence of requests, honest and not: never two sums of a round, never a small one."""

    scene: Any = None  # set by the test that runs the machine

    @initialize()
    def begin(self) -> None:
        self.helper = Helper(helper=1, settings=self.scene.settings)
        self.scene.keys = {1: self.scene.hello(self.helper)}
        self.requests: list[CombineRequest] = []
        self.sums: dict[int, set[bytes]] = {}
        self.counts: list[int] = []

    @rule(clients=st.sets(st.integers(0, 5), min_size=3), server_round=st.integers(1, 3))
    def a_round(self, clients: set[int], server_round: int) -> None:
        self.requests.append(request_of(self.scene, sorted(clients), server_round))
        self._ask(self.requests[-1])

    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        if self.requests:
            self._ask(data.draw(st.sampled_from(self.requests)))

    @rule(data=st.data())
    def fewer_clients(self, data: st.DataObject) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            keep = data.draw(st.integers(0, len(request.clients)))
            self._ask(
                replace(request, clients=request.clients[:keep], envelopes=request.envelopes[:keep])
            )

    @rule(data=st.data())
    def twice(self, data: st.DataObject) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            self._ask(
                replace(
                    request,
                    clients=(*request.clients, request.clients[0]),
                    envelopes=(*request.envelopes, request.envelopes[0]),
                )
            )

    @rule(data=st.data(), bit=st.integers(0, 80 * 8 - 1), cut=st.booleans())
    def damaged(self, data: st.DataObject, bit: int, cut: bool) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            first = bytearray(request.envelopes[0])
            if cut:
                del first[bit // 8 :]
            else:
                first[bit // 8] ^= 1 << bit % 8
            self._ask(replace(request, envelopes=(bytes(first), *request.envelopes[1:])))

    @rule(data=st.data(), server_round=st.integers(0, 4), model=st.sampled_from(["x", "y"]))
    def other_context(self, data: st.DataObject, server_round: int, model: str) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            self._ask(replace(request, server_round=server_round, model=model))

    @rule()
    def restart(self) -> None:
        state = from_record(HelperState, to_record(self.helper.state).config)
        self.helper = Helper(helper=1, settings=self.scene.settings, state=state)

    @rule()
    def hello_again(self) -> None:
        self.scene.hello(self.helper)

    @invariant()
    def one_sum_a_round(self) -> None:
        assert all(len(sums) == 1 for sums in getattr(self, "sums", {}).values())

    @invariant()
    def never_of_few(self) -> None:
        assert all(count >= 3 for count in getattr(self, "counts", []))

    def _ask(self, request: CombineRequest) -> None:
        try:
            reply: CombineReply = self.helper.combine(request)
        except SecureAggregationError:
            return
        if reply.released:
            self.sums.setdefault(request.server_round, set()).add(reply.total.tobytes())
            self.counts.append(len(request.clients))


def test_no_sequence_of_requests_gets_two_sums_of_a_round(secure_parties: Any) -> None:
    class Machine(HelperUnderAttack):
        scene = secure_parties(shapes={"w": (2,)})

    Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
    Machine.TestCase().runTest()


def test_the_fuzzer_finds_a_helper_that_forgets(secure_parties: Any) -> None:
    """A negative control: a helper that forgets its answer must break the invariant."""

    class Forgetful(Helper):
        def combine(self, request: CombineRequest) -> CombineReply:
            self.state = replace(self.state, answered=0, question="")
            return super().combine(request)

    class Machine(HelperUnderAttack):
        scene = secure_parties(shapes={"w": (2,)})

        @initialize()
        def begin(self) -> None:
            super().begin()
            self.helper = Forgetful(helper=1, settings=self.scene.settings, state=self.helper.state)

        @rule()
        def restart(self) -> None:
            """Stays forgetful."""

    Machine.TestCase.settings = settings(
        max_examples=100,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # the first sequence that it finds, and no smaller one
    )
    with pytest.raises(AssertionError):
        Machine.TestCase().runTest()
