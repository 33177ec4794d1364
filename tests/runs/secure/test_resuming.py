"""A run that was cut off goes on to the same result, and opens no second sum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedsim.experiment import load_experiment
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.resume import refuse_changes
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.secagg.payload import PayloadCodec
from fedsim.server.secure.opened_sums import OpenedSum
from fedsim.tracking.callbacks import RunCallback


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_an_interrupted_run_resumes_to_the_same_result(
    lab: Any, stop_after: Callable[[int], RunCallback], tmp_path: Path, protocol: str
) -> None:
    secure = lab.experiment({"protocol": protocol}, privacy=lab.privacy)
    whole = lab.control({"protocol": protocol}, privacy=lab.privacy)
    assert (
        run_experiment(secure, out=tmp_path / "r", callback=stop_after(1)).status == "interrupted"
    )
    result = run_experiment(secure, out=tmp_path / "r", resume=True)
    lab.same_result(whole, result)
    assert (whole.path / "privacy.json").read_bytes() == (result.path / "privacy.json").read_bytes()


def test_patience_may_change_on_resume_and_numbers_may_not(lab: Any) -> None:
    def experiment(secure: dict[str, Any]) -> Any:
        return load_experiment(lab.experiment(secure)).experiment

    patient = {"name": "additive", "combine_retries": 5, "combine_timeout_s": 1.0}
    refuse_changes(experiment({}), experiment({"on_abort": "skip_round", "protocol": patient}))
    with pytest.raises(RunDirectoryError, match=r"encoding.value_bound was auto in the run and is"):
        refuse_changes(experiment({}), experiment({"encoding": {"value_bound": 4.0}}))


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_a_run_that_dies_inside_a_round_resumes_to_the_same_result(
    lab: Any, tmp_path: Path, protocol: str
) -> None:
    """Charged and uploaded, but not opened: the round is repeated under a new run id."""
    stage = "secagg_combine" if protocol == "additive" else "secagg_masked"

    def power_cut(request: Message) -> bool:
        if request.metadata.message_type.endswith(stage):
            raise KeyboardInterrupt
        return False

    secure = lab.experiment({"protocol": protocol}, privacy=lab.privacy)
    whole = lab.control({"protocol": protocol}, privacy=lab.privacy)
    cut = run_experiment(secure, out=tmp_path / "r", engine=lab.wire(power_cut))
    assert (cut.status, cut.rounds) == ("interrupted", ())
    assert cut.privacy is not None
    assert {spend.rounds for spend in cut.privacy.clients} == {1}
    lab.same_result(whole, run_experiment(secure, out=tmp_path / "r", resume=True))


class Cut:
    """A power cut at the moment when the server has the sum of round 1, and no checkpoint yet."""

    def __init__(self, protocol: str) -> None:
        self._last = "secagg_combine" if protocol == "additive" else "secagg_unmask"

    def __call__(self, request: Message, _: Message) -> None:
        if request.metadata.message_type.endswith(self._last):
            raise KeyboardInterrupt


def asked(wire: Any) -> list[tuple[int, ...]]:
    """Return the sets of clients whose sum somebody was asked for."""
    found = []
    for request, _ in wire.seen:
        config = request.content.config_records.get("secagg", {})
        if config.get("kind") == "CombineRequest":
            found.append(tuple(config["clients"]))
        if config.get("kind") == "UnmaskRequest":
            found.append(tuple(config["active"]))
    return found


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_a_resumed_round_opens_no_sum_of_fewer_clients(
    lab: Any, tmp_path: Path, protocol: str
) -> None:
    """The differencing attack over a restart: S(U) is known, and S(U without i) is never asked."""
    secure = {"protocol": protocol}
    lab.run(tmp_path / "r", secure, lab.wire(twisted=Cut(protocol)))
    fewer = lab.wire(lab.loses("train", [4], [1]))
    said = "AlreadyAnsweredError: round 1: .* sum of 6 clients .* \\[4\\] of them are missing"
    again = lab.experiment(secure)
    with pytest.raises(RunFailedError, match=said):
        run_experiment(again, out=tmp_path / "r", resume=True, engine=fewer)
    assert asked(fewer) == []
    lab.same_result(lab.control(secure), run_experiment(again, out=tmp_path / "r", resume=True))


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_a_resumed_round_opens_no_sum_of_more_clients(
    lab: Any, tmp_path: Path, protocol: str
) -> None:
    """Who comes back for the repeated round stays out of its sum, and joins in the next."""
    secure = {"protocol": protocol}
    lost = lab.loses("train", [4], [1])
    lab.run(tmp_path / "r", secure, lab.wire(lost, Cut(protocol)))
    back = lab.wire()
    result = run_experiment(lab.experiment(secure), out=tmp_path / "r", resume=True, engine=back)
    assert [len(row["participants"]) for row in result.rounds] == [5, 6]
    assert asked(back)[0] == (0, 1, 2, 3, 5)
    (failed,) = result.rounds[0]["failed"]
    assert (failed["client"], "takes part again in the next round" in failed["reason"]) == (4, True)
    whole = lab.run(tmp_path / "w", secure, lab.wire(lab.loses("train", [4], [1])))
    lab.same_result(whole, result)


def test_without_the_record_two_sums_would_give_an_update(lab: Any, tmp_path: Path) -> None:
    """What the record is for: without it, two sums differ by one client's update."""
    sums = []

    def recorded(codec: PayloadCodec, total: Any, **options: Any) -> Any:
        sums.append(total.copy())
        return decode(codec, total, **options)

    def cut(_: Message) -> bool:
        if len(sums) == 1:
            raise KeyboardInterrupt
        return False

    decode = PayloadCodec.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PayloadCodec, "decode", recorded)
        lab.run(tmp_path / "r", {}, lab.wire(cut))
        RunDirectory(tmp_path / "r").write_opening(OpenedSum(0, ()))
        (tmp_path / "r" / "manifest.json").unlink()  # as after a kill
        (tmp_path / "r" / "checkpoint" / "model.safetensors").unlink()
        (tmp_path / "r" / "rounds.jsonl").write_text("")
        fewer = lab.wire(lab.loses("train", [4], [1]))
        resumed = lab.experiment({}, federation={"rounds": 2})
        run_experiment(resumed, out=tmp_path / "r", resume=True, engine=fewer)
    difference = sums[0] - sums[1]
    assert int(difference[-1]) == 1  # one client, and its weight is there to read
    assert int(difference[-2]) == len(lab.examples(4))


def test_a_round_that_cannot_be_opened_again_can_be_skipped_on_resume(
    lab: Any, tmp_path: Path
) -> None:
    lab.run(tmp_path / "r", {}, lab.wire(twisted=Cut("additive")))
    skipping = lab.experiment({"on_abort": "skip_round"})
    fewer = lab.wire(lab.loses("train", [4], [1]))
    result = run_experiment(skipping, out=tmp_path / "r", resume=True, engine=fewer)
    said = [row["secure_aggregation"]["aborted"] for row in result.rounds]
    assert said[0].startswith("AlreadyAnsweredError")
    assert said[1] is None
