"""A run that is interrupted continues to the same end, and never un-spends."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.clients import client_round
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.resume import resume_command
from fedsim.runs.runner import run_experiment
from fedsim.tracking.callbacks import RunCallback

EXPERIMENT: dict[str, Any] = {
    "name": "resume",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 4, "min_examples": 20},
    },
    "model": {"name": "mlp", "args": {"hidden": [40]}},
    "federation": {"rounds": 4, "clients_per_round": 3},
    "local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
SAME = (
    "model.safetensors",
    "privacy.json",
    "clients.csv",
    "ledger.jsonl",
    "releases.jsonl",
    "experiment.yaml",
)


@pytest.mark.parametrize(
    "overrides", ["a.b=null", ["a.b=null"], {"a.b": None}], ids=["text", "list", "mapping"]
)
def test_the_command_that_goes_on_repeats_the_overrides(overrides: Any) -> None:
    command = resume_command("e.yaml", overrides, Path("run"))
    assert command == "fedsim run e.yaml a.b=null --out run --resume"


def assert_equal_runs(one: Path, other: Path) -> None:
    for name in SAME:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    rows = [
        [
            {**json.loads(line), "seconds": 0, "timeline": {}}
            for line in (run / "rounds.jsonl").open()
        ]
        for run in (one, other)
    ]
    assert rows[0] == rows[1]
    assert json.loads((other / "summary.json").read_text())["status"] == "completed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(EXPERIMENT, out=tmp_path_factory.mktemp("resume") / "whole").path


@pytest.mark.parametrize("private", [True, False])
def test_interrupted_and_resumed_equals_uninterrupted(
    stop_after: Callable[[int], RunCallback], whole: Path, tmp_path: Path, private: bool
) -> None:
    experiment = EXPERIMENT if private else {**EXPERIMENT, "privacy": None}
    if not private:
        whole = run_experiment(experiment, out=tmp_path / "whole").path
    for stop in (1, 3):
        stopped = run_experiment(
            experiment, out=tmp_path / "r", callback=stop_after(stop), resume=stop > 1
        )
        assert stopped.status == "interrupted"
        assert len(stopped.rounds) == stop
    result = run_experiment(experiment, out=tmp_path / "r", resume=True)
    assert [row["round"] for row in result.rounds] == [1, 2, 3, 4]
    assert_equal_runs(whole, tmp_path / "r")


def test_an_error_that_a_library_made_of_ctrl_c_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, stop_after: Callable[[int], RunCallback], tmp_path: Path
) -> None:
    callback = stop_after(1)
    interrupt = callback.round_finished

    def error_of_a_library(row: Mapping[str, Any]) -> None:
        try:
            interrupt(row)
        except KeyboardInterrupt as error:
            raise SystemError("returned a result with an exception set") from error

    monkeypatch.setattr(callback, "round_finished", error_of_a_library)
    result = run_experiment(EXPERIMENT, out=tmp_path / "r", callback=callback)
    assert (result.status, len(result.rounds)) == ("interrupted", 1)


def test_charges_of_an_interrupted_round_are_kept_and_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"local.vectorized_clients": "off"}
    run_experiment(EXPERIMENT, overrides=alone, out=tmp_path / "whole")
    train, calls = client_round.block_of, []

    def power_cut(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[-1])
        if len(calls) == 8:  # in the middle of round 3, after all were charged
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(client_round, "block_of", power_cut)
    result = run_experiment(EXPERIMENT, overrides=alone, out=tmp_path / "cut")
    assert result.status == "interrupted"
    assert len(result.rounds) == 2
    charged = [json.loads(line) for line in (tmp_path / "cut" / "ledger.jsonl").open()]
    assert [record["round"] for record in charged] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert result.privacy is not None
    assert sum(spend.rounds for spend in result.privacy.clients) == 9, "spent and shown as spent"
    monkeypatch.setattr(client_round, "block_of", train)
    run_experiment(EXPERIMENT, overrides=alone, out=tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_more_rounds_where_the_noise_does_not_depend_on_them(whole: Path, tmp_path: Path) -> None:
    run_experiment(EXPERIMENT, overrides={"federation.rounds": 3}, out=tmp_path / "r")
    run_experiment(EXPERIMENT, out=tmp_path / "r", resume=True)
    assert_equal_runs(whole, tmp_path / "r")


TARGET = {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def begun(
    stop_after: Callable[[int], RunCallback], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run to a target, of one round, which no refusal changes."""
    out = tmp_path_factory.mktemp("resume") / "begun"
    return run_experiment(
        EXPERIMENT, overrides={"privacy": TARGET}, out=out, callback=stop_after(1)
    ).path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 in the run and is 1 now"),
        ({"local.optimizer.lr": 0.1}, r"local.optimizer.lr was 0.5 .* is 0.1 now"),
        ({"privacy.max_grad_norm": 1.0}, "privacy.max_grad_norm was 0.5"),
        ({"privacy": None}, "privacy was "),
        ({"federation.rounds": 2}, "rounds can only be added"),
        ({"federation.rounds": 9}, "target_epsilon or target_rho of each client over 4"),
        ({"data.partition.num_clients": 5}, "data.partition.num_clients was 4"),
    ],
)
def test_a_changed_experiment_is_not_continued(
    begun: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunDirectoryError, match=message):
        run_experiment({**EXPERIMENT, "privacy": TARGET}, overrides=change, out=begun, resume=True)


def test_data_that_changed_under_the_same_name_are_not_continued_with(
    stop_after: Callable[[int], RunCallback], tmp_path: Path
) -> None:
    def write(seed: int) -> None:
        numbers = np.random.default_rng(seed)
        x, y = numbers.normal(size=(200, 3)).astype(np.float32), numbers.integers(0, 2, 200)
        np.savez(tmp_path / "d.npz", x=x, y=y)

    data = {
        "dataset": {"path": "d.npz", "target": "y"},
        "partition": EXPERIMENT["data"]["partition"],
    }
    experiment = {**EXPERIMENT, "data": data}
    write(1)
    run_experiment(experiment, base=tmp_path, out=tmp_path / "r", callback=stop_after(1))
    write(2)
    with pytest.raises(RunDirectoryError, match="the data, or how they are divided"):
        run_experiment(experiment, base=tmp_path, out=tmp_path / "r", resume=True)
    write(1)
    result = run_experiment(experiment, base=tmp_path, out=tmp_path / "r", resume=True)
    assert result.status == "completed"


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="name the run directory"):
        run_experiment(EXPERIMENT, resume=True)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        run_experiment(EXPERIMENT, out=tmp_path / "none", resume=True)
