"""Helpers that are silent, asked again, asked differently, or damaged on the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedsim.protocol.arrays import to_arrays
from fedsim.runs.runner import RunFailedError, run_experiment


def test_a_dead_helper_ends_the_run_and_leaves_model_and_charges(lab: Any, tmp_path: Path) -> None:
    lost = lab.loses("secagg_combine", [lab.clients], [2])
    with pytest.raises(
        RunFailedError, match=r"AggregatorUnavailableError: helpers \[1\]"
    ) as caught:
        lab.run(tmp_path / "r", {}, lab.wire(lost), privacy=lab.privacy)
    result = caught.value.result
    first = lab.control({}, privacy=lab.privacy, federation={"rounds": 1})
    assert lab.model(result.path).keys() == lab.model(first.path).keys()
    for name, value in lab.model(first.path).items():
        np.testing.assert_array_equal(lab.model(result.path)[name], value)
    assert result.privacy is not None
    assert {spend.rounds for spend in result.privacy.clients} == {2}
    again = lab.experiment({}, privacy=lab.privacy)
    resumed = run_experiment(again, out=result.path, resume=True)
    lab.same_result(resumed, lab.control({}, privacy=lab.privacy))


def test_a_round_that_cannot_be_opened_can_be_skipped(lab: Any, tmp_path: Path) -> None:
    once = {"name": "additive", "combine_retries": 1}
    secure = {"on_abort": "skip_round", "protocol": once}
    wire = lab.wire(lab.loses("secagg_combine", [lab.clients], [2]))
    result = lab.run(tmp_path / "r", secure, wire, federation={"rounds": 3})
    said = [row["secure_aggregation"] for row in result.rounds]
    assert [one["survivors"] for one in said] == [6, 0, 6]
    assert said[1]["aborted"].startswith("AggregatorUnavailableError")
    assert said[1]["retried"] == 1
    assert result.rounds[1]["test_loss"] == result.rounds[0]["test_loss"]
    assert len(result.rounds[1]["failed"]) == lab.clients
    rounds = json.loads((result.path / "privacy.json").read_text())["secure_aggregation"]["rounds"]
    assert (rounds["completed"], rounds["aborted"], rounds["retried"]) == (2, 1, 1)


def test_a_helper_that_is_asked_again_gives_the_same_share(lab: Any, tmp_path: Path) -> None:
    asked: list[int] = []

    def lost(request: Message) -> bool:
        if not request.metadata.message_type.endswith("secagg_combine"):
            return False
        asked.append(lab.party(request))
        return len(asked) == 1

    result = lab.run(tmp_path / "r", {}, lab.wire(lost))
    lab.same_result(result, lab.control(lab.quantized))
    assert [row["secure_aggregation"]["retried"] for row in result.rounds] == [1, 0]


def test_two_sums_of_one_round_are_refused(lab: Any, tmp_path: Path) -> None:
    """The differencing attack: x_i = S(U) - S(U without i); over messages, on the helper's node."""
    answers: list[Message] = []
    wire = lab.wire()

    def attack(request: Message, reply: Message) -> None:
        if not request.metadata.message_type.endswith("secagg_combine") or answers:
            return
        config = request.content.config_records["secagg"]
        for without in (False, True):
            asked = dict(config)
            if without:
                asked["clients"] = list(config["clients"])[1:]  # pyright: ignore[reportArgumentType]
                asked["envelopes"] = list(config["envelopes"])[1:]  # pyright: ignore[reportArgumentType]
            answers.append(reply)
            message = _like(request, asked)
            assert wire.grid is not None
            (answer,) = super(type(wire.grid), wire.grid).send_and_receive([message])  # pyright: ignore[reportAttributeAccessIssue]
            answers.append(answer)

    wire.twisted = attack
    lab.run(tmp_path / "r", {}, wire)
    genuine, same, _, different = (one.content.config_records["secagg"] for one in answers)
    assert (genuine["kind"], same["kind"]) == ("CombineReply", "CombineReply")
    first, again = (
        one.content.array_records["secagg-arrays"]["total"].numpy() for one in answers[:2]
    )
    np.testing.assert_array_equal(first, again)
    assert (different["kind"], different["error"]) == ("Refusal", "AlreadyAnsweredError")
    assert "secagg-arrays" not in answers[3].content


def _like(request: Message, config: dict[str, Any]) -> Message:
    content = RecordDict({"secagg": ConfigRecord(config)})
    return Message(content, request.metadata.dst_node_id, request.metadata.message_type)


def test_a_flipped_bit_of_a_helpers_share_never_reaches_the_model(lab: Any, tmp_path: Path) -> None:
    def flip(request: Message, reply: Message) -> None:
        if request.metadata.message_type.endswith("secagg_combine"):
            total = reply.content.array_records["secagg-arrays"]["total"].numpy().copy()
            total[3] ^= np.uint64(1)
            reply.content["secagg-arrays"] = to_arrays({"total": total})

    with pytest.raises(RunFailedError, match="ShareMismatchError"):
        lab.run(tmp_path / "r", {}, lab.wire(twisted=flip))
