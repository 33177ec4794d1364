"""Clients that drop out leave the exact sum of the others, or a named error."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.runs.runner import RunFailedError


@pytest.mark.parametrize(
    ("gone", "moment"),
    [(1, "after"), (2, "before"), (2, "in training"), (2, "after"), (3, "before"), (3, "after")],
)
def test_dropouts_leave_the_exact_sum_of_the_others_or_a_named_error(
    lab: Any, tmp_path: Path, gone: int, moment: str
) -> None:
    """{1, n-min, n-min+1} clients of 5 with min_clients 3; more parties: server/secure."""
    kinds = {"before": "dropout_before", "in training": "dropout_during"}
    kind = kinds.get(moment)
    faults = [{"kind": kind, "clients": list(range(gone))}] if kind else []

    def result(name: str, secure: dict[str, Any]) -> Any:
        lost = lab.loses("train", range(gone) if kind is None else ())
        federation = {"rounds": 1}
        return lab.run(
            tmp_path / name,
            secure,
            lab.wire(lost),
            federation=federation,
            faults=faults,
            data=lab.iid(5),
        )

    if gone <= 2:
        lab.same_result(result("a", {"aggregators": 3}), result("q", lab.quantized))
        return
    with pytest.raises(RunFailedError, match="TooFewClientsError: round 1: 2 clients are left"):
        result("a", {"aggregators": 3})


@pytest.mark.parametrize(("protocol", "stage", "counts"), [
    ("secagg", "train", False), ("secagg", "secagg_shares", False),
    ("secagg_plus", "secagg_masked", False), ("secagg", "secagg_unmask", True),
])  # fmt: skip
def test_secagg_survives_a_dropout_in_each_stage(
    lab: Any, tmp_path: Path, protocol: str, stage: str, counts: bool
) -> None:
    """Who drops out after its masked update came is in the sum; who does before is not."""
    federation = {"rounds": 1}
    wire = lab.wire(lab.loses(stage, [4]))
    secure = lab.run(tmp_path / "s", {"protocol": protocol}, wire, federation=federation)
    left_out = lab.wire(lab.loses("train", [] if counts else [4]))
    control = lab.run(tmp_path / "q", lab.quantized, left_out, federation=federation)
    lab.same_result(secure, control)
    assert ([one["client"] for one in secure.rounds[0]["failed"]] == [4]) == (not counts)


@pytest.mark.parametrize("stage", ["secagg_shares", "secagg_masked", "secagg_unmask"])
def test_secagg_below_the_threshold_is_a_named_error(lab: Any, tmp_path: Path, stage: str) -> None:
    with pytest.raises(RunFailedError, match="ThresholdError") as caught:
        lab.run(tmp_path / "r", {"protocol": "secagg"}, lab.wire(lab.loses(stage, [0, 1, 2], [2])))
    assert [row["secure_aggregation"]["survivors"] for row in caught.value.result.rounds] == [6, 0]
