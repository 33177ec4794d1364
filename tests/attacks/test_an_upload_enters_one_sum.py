"""An upload enters at most one opened sum, of its own round, model, asked clients and plan."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedsim.secagg.errors import (
    AlreadyAnsweredError,
    ContextMismatchError,
    ReplayError,
    SecureAggregationError,
)
from fedsim.secagg.messages import CombineRequest
from fedsim.server.secure.helper import Helper, HelperRelease, HelperState
from fedsim.tools.deployment.node_state import record_release


def request_of(scene: Any, server_round: int = 1, clients: Any = range(6)) -> CombineRequest:
    leader = scene.leader(server_round)
    for client in clients:
        leader.add(scene.upload(leader, client))
    return leader.requests()[1]


def without(request: CombineRequest, client: int) -> CombineRequest:
    kept = [place for place, one in enumerate(request.clients) if one != client]
    return replace(
        request,
        clients=tuple(request.clients[place] for place in kept),
        envelopes=tuple(request.envelopes[place] for place in kept),
    )


def helper_of(scene: Any, state: HelperState, record: Callable[[HelperRelease], None]) -> Helper:
    return Helper(helper=1, settings=scene.settings, state=state, record=record)


@pytest.mark.parametrize("server_round", [1, 2])
def test_a_helper_with_an_older_state_opens_no_second_sum(
    secure_parties: Any, tmp_path: Path, server_round: int
) -> None:
    """Two processes of one helper start from the same state, or the state went back after a crash.

    The difference of the two sums would be the update of client 5.
    """
    scene = secure_parties()
    record = partial(record_release, tmp_path / "state", 1)
    before = scene.helpers[1].state
    request = request_of(scene, server_round)
    first = helper_of(scene, before, record).combine(request)
    assert first.released
    with pytest.raises(AlreadyAnsweredError, match="another released sum of this round"):
        helper_of(scene, before, record).combine(without(request, 5))
    again = helper_of(scene, before, record).combine(request)
    assert again.total.tobytes() == first.total.tobytes(), "the same question, the same answer"


def test_an_earlier_round_stays_closed(secure_parties: Any, tmp_path: Path) -> None:
    scene = secure_parties()
    record = partial(record_release, tmp_path, 1)
    before = scene.helpers[1].state
    early, late = request_of(scene, 1), request_of(scene, 2)
    helper_of(scene, before, record).combine(early)
    helper_of(scene, before, record).combine(late)
    with pytest.raises(ReplayError, match="released sum of round 2"):
        helper_of(scene, before, record).combine(without(early, 5))


def test_no_sum_leaves_a_helper_that_cannot_record_it(secure_parties: Any, tmp_path: Path) -> None:
    scene = secure_parties()
    record = partial(record_release, tmp_path, 1)
    before = scene.helpers[1].state
    request = request_of(scene)
    helper_of(scene, before, record).combine(request)
    (path,) = (tmp_path / "helper-1").glob("*.json")
    path.write_text("")
    with pytest.raises(SecureAggregationError, match="is damaged, so a second sum"):
        helper_of(scene, before, record).combine(without(request, 5))
    path.unlink()
    os.chmod(tmp_path / "helper-1", 0o755)
    with pytest.raises(SecureAggregationError, match=r"sends no sum: .* can be opened by other"):
        helper_of(scene, before, record).combine(request)


@pytest.mark.parametrize(
    "change",
    [{"asked": tuple(range(7))}, {"plan": "a plan with less noise"}, {"model": "another"}],
    ids=["asked", "plan", "model"],
)
def test_an_upload_opens_for_what_its_client_saw_only(
    secure_parties: Any, change: dict[str, Any]
) -> None:
    scene = secure_parties()
    reply = scene.helpers[1].combine(replace(request_of(scene), **change))
    assert (reply.released, reply.rejected) == (False, tuple(range(6)))


def test_uploads_of_two_plans_enter_no_sum_together(secure_parties: Any) -> None:
    """Client 5 was shown a plan of its own: the helper names it, and opens nothing with it."""
    scene = secure_parties()
    leader = scene.leader()
    for client in range(6):
        leader.add(scene.upload(leader, client))
    request = leader.requests()[1]
    other = replace(leader.offer(scene.keys), plan="less noise")
    uploader = replace(scene.uploader(5), plan="less noise")
    (envelope,) = uploader.upload(other, **scene.arguments(5)).envelopes
    mixed = replace(request, envelopes=(*request.envelopes[:5], envelope))
    reply = scene.helpers[1].combine(mixed)
    assert (reply.released, reply.rejected) == (False, (5,))


def test_a_client_refuses_a_plan_that_is_not_its_own(secure_parties: Any) -> None:
    scene = secure_parties()
    offer = replace(scene.leader().offer(scene.keys), plan="less noise")
    with pytest.raises(ContextMismatchError, match="announced privacy plan less noise"):
        scene.uploader(0).upload(offer, **scene.arguments(0))


def test_a_client_that_was_not_asked_is_in_no_sum(secure_parties: Any) -> None:
    scene = secure_parties()
    request = request_of(scene)
    with pytest.raises(ContextMismatchError, match="was not asked"):
        scene.helpers[1].combine(replace(request, asked=request.asked[:-1]))
