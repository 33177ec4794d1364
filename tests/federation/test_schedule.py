"""The one schedule of local steps: plans, charges, training and checks agree with it."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedsim.clients.local_settings import LocalSettings
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

SIZES = {"scheme": "quantity", "num_clients": 5, "alpha": 0.5, "min_examples": 40}
EXPERIMENT: dict[str, Any] = {
    "name": "epochs",
    "data": {"dataset": "digits", "partition": SIZES},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2, "clients_per_round": 4},
    "local": {"epochs": 1.5, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(EXPERIMENT, out=tmp_path_factory.mktemp("epochs") / "run").path


def test_each_client_takes_the_steps_of_its_own_epochs(run: Path) -> None:
    clients = RunDirectory(run).read_json("privacy.json")["clients"]
    assert len({one["steps"] / one["rounds"] for one in clients if one["rounds"]}) > 2
    for one in clients:
        batch = min(32, one["examples"])
        assert one["steps"] == one["rounds"] * math.ceil(1.5 * one["examples"] / batch)
        assert one["epsilon"] <= 4.0
        assert one["epsilon"] == pytest.approx(4.0, rel=1e-2) or not one["rounds"]


def test_a_run_of_epochs_is_sound_and_is_replayed(run: Path) -> None:
    assert not verify_run(RunDirectory(run)).problems
    assert not replay_run(RunDirectory(run)).problems


@pytest.mark.parametrize(
    ("epochs", "rate", "steps"),
    [(1.0, 1.0, 1), (0.1, 1.0, 1), (3.0, 0.1, 30), (0.7, 0.1, 7), (1.0, 1 / 49, 49), (2.1, 0.5, 5)],
)
def test_epochs_are_rounded_up_to_whole_steps(epochs: float, rate: float, steps: int) -> None:
    assert LocalSettings(epochs=epochs, batch_size=8).steps_at_rate(rate) == steps


def test_more_steps_than_the_largest_number_are_refused() -> None:
    with pytest.raises(ValueError, match="9,000,000 steps a round, and 1,000,000 is the most"):
        LocalSettings(epochs=9e5, batch_size=8).steps_at_rate(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local.steps": 3}, "steps (3) and epochs (1.5) both set the length of a round"),
        ({"local.epochs": None}, "needs steps, or epochs in its place"),
        ({"privacy.trust": "central"}, "local.epochs: gives several steps a round"),
        (
            {"privacy.unit": "client", "privacy.max_grad_norm": None, "privacy.max_update_norm": 1},
            "local.epochs: makes a client's steps follow from its size",
        ),
    ],
)
def test_epochs_that_reveal_or_contradict_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(EXPERIMENT, overrides=changes)
    assert message in str(caught.value)


def test_a_declared_size_sets_the_steps_of_all(tmp_path: Path) -> None:
    declared = {
        "privacy.adjacency": {"name": "add_remove", "declared_examples": 320},
        "privacy.target_epsilon": None,
        "privacy.noise_multiplier": 1.0,
    }
    path = run_experiment(EXPERIMENT, overrides=declared, out=tmp_path / "run").path
    clients = RunDirectory(path).read_json("privacy.json")["clients"]
    assert {one["steps"] / one["rounds"] for one in clients if one["rounds"]} == {15.0}
    assert not verify_run(RunDirectory(path)).problems
