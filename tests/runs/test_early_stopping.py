"""A run ends when the test set improves no more: resumed, verified and replayed alike."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.experiment import ExperimentError, load_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.server.settings import EarlyStoppingSettings
from fedsim.tools.replay import replay_run


def settings(stopping: dict[str, Any], **local: Any) -> dict[str, Any]:
    return {
        "name": "stopping",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 12, "early_stopping": stopping},
        "local": {"steps": 1, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 4.0, **local}},
        "privacy": {"target_epsilon": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }


def test_the_best_value_counts_by_more_than_the_least_improvement() -> None:
    rule = EarlyStoppingSettings(metric="accuracy", patience=2, min_delta=0.1)
    best, kept = None, []
    for number, value in enumerate([0.5, 0.55, 0.61, float("nan"), 0.7], start=1):
        best = rule.next_best(best, value, number)
        kept.append(best)
    assert kept == [(0.5, 1), (0.5, 1), (0.61, 3), (0.61, 3), (0.61, 3)]
    assert [rule.reason_to_stop((0.61, 3), n) is None for n in (3, 4, 5)] == [True, True, False]
    loss = EarlyStoppingSettings(patience=1)
    assert loss.next_best((1.0, 1), 0.9, 2) == (0.9, 2)
    assert "for 1 round; best" in str(loss.reason_to_stop((0.9, 2), 3))
    assert loss.next_best((0.9, 2), None, 3) == (0.9, 2)
    upwards = EarlyStoppingSettings(patience=1, goal="max")
    assert upwards.next_best((1.0, 1), 0.9, 2) == (1.0, 1)


def test_a_run_ends_early_resumes_alike_and_is_verified(tmp_path: Path, stop_after: Any) -> None:
    stopping = {"metric": "accuracy", "patience": 2, "min_delta": 0.2}
    whole = run_experiment(settings(stopping), out=tmp_path / "whole")
    assert whole.status == "stopped"
    assert "test_accuracy has not improved by more than 0.2 for 2 rounds" in str(whole.reason)
    assert 2 < len(whole.rounds) < 12
    assert whole.privacy is not None
    assert (
        max(one.epsilon for one in whole.privacy.clients) < 0.99
    )  # what ran, not what was planned
    assert all(one.rounds == len(whole.rounds) for one in whole.privacy.clients)
    run_experiment(
        settings(stopping), out=tmp_path / "part", callback=stop_after(len(whole.rounds) - 1)
    )
    run_experiment(settings(stopping), out=tmp_path / "part", resume=True)
    again = run_experiment(settings(stopping), out=tmp_path / "part", resume=True)  # it has ended
    assert (again.status, again.reason) == (whole.status, whole.reason)
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (whole.path / name).read_bytes() == (again.path / name).read_bytes(), name
    for run in (whole, again):
        directory = RunDirectory(run.path)
        assert verify_run(directory).problems == ()
        assert replay_run(directory).problems == ()


@pytest.mark.parametrize("metric", ["f1", "recall_per_class", "mse"])
def test_a_metric_that_the_test_set_does_not_have_is_refused(metric: str) -> None:
    with pytest.raises(ExperimentError, match="must be one of loss, accuracy"):
        load_experiment(settings({"metric": metric, "patience": 1}))
