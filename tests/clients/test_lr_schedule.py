"""Schedules of the local learning rate: torch's formulas, and what a whole run does with them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.optim import lr_scheduler

from fedsim.clients.local_settings import LocalSettings
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

ROUNDS = 12
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "constant": (lr_scheduler.ConstantLR, {"factor": 0.5, "total_iters": 3}),
    "step": (lr_scheduler.StepLR, {"step_size": 4, "gamma": 0.3}),
    "exponential": (lr_scheduler.ExponentialLR, {"gamma": 0.8}),
    "linear": (
        lr_scheduler.LinearLR,
        {"start_factor": 1.0, "end_factor": 0.2, "total_iters": 5},
    ),
    "cosine": (lr_scheduler.CosineAnnealingLR, {"T_max": ROUNDS, "eta_min": 0.05}),
}
EXPERIMENT: dict[str, Any] = {
    "name": "schedule",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 40.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
STEP = {"name": "step", "step_size": 1, "gamma": 0.01}


def rates(schedule: dict[str, Any]) -> list[float]:
    optimizer = {"name": "sgd", "lr": 2.0}
    local = LocalSettings.model_validate(
        {"steps": 1, "batch_size": 1, "optimizer": optimizer, "lr_schedule": schedule}
    )
    return [local.optimizer_in(number).lr for number in range(1, ROUNDS + 1)]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rates_are_those_of_torch(name: str, warmup: int) -> None:
    kind, args = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    scheduler = kind(optimizer, **args)
    expected = [2.0 * number / (warmup + 1) for number in range(1, warmup + 1)]
    while len(expected) < ROUNDS:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates({"name": name, "warmup": warmup, **args}) == pytest.approx(expected, rel=1e-9)


def test_a_run_takes_the_rate_of_each_round_at_the_same_charge(tmp_path: Path) -> None:
    plain = run_experiment(EXPERIMENT, out=tmp_path / "plain")
    found = run_experiment(
        EXPERIMENT, overrides={"local.lr_schedule": STEP}, out=tmp_path / "scheduled"
    )
    first, second = found.rounds
    assert second["update_norm"] == pytest.approx(0.01 * first["update_norm"], rel=0.1)
    assert second["noise_norm"] == pytest.approx(0.01 * first["noise_norm"], rel=1e-9)
    assert found.privacy is not None
    assert plain.privacy is not None
    assert found.privacy.system_epsilon == plain.privacy.system_epsilon
    assert not verify_run(RunDirectory(found.path)).problems
    assert not replay_run(RunDirectory(found.path)).problems


def test_training_by_torch_takes_the_rate_of_the_round(tmp_path: Path) -> None:
    changes = {
        "privacy": None,
        "federation.rounds": 1,
        "local.lr_schedule": {"name": "constant", "factor": 0.25},
    }
    scheduled = run_experiment(EXPERIMENT, overrides=changes, out=tmp_path / "scheduled").path
    changes = {"privacy": None, "federation.rounds": 1, "local.optimizer.lr": 0.125}
    plain = run_experiment(EXPERIMENT, overrides=changes, out=tmp_path / "plain").path
    one, other = (load_file(path / "model.safetensors") for path in (scheduled, plain))
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy.trust": "central", "local.steps": 1}, "local.lr_schedule: trust: central plans"),
        ({"local.lr_schedule": {"name": "cosine", "T_max": 1}}, "of round 2 is 0"),
        ({"local.lr_schedule": {"name": "step"}}, "local.lr_schedule.step_size: missing"),
        ({"local.lr_schedule": {**STEP, "gamma": 2.0}}, "local.lr_schedule.gamma: must be <= 1"),
    ],
)
def test_schedules_that_have_no_theorem_or_end_too_early_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(EXPERIMENT, overrides={"local.lr_schedule": STEP, **changes})
    assert message in str(caught.value)


def test_a_schedule_stays_at_its_end() -> None:
    assert rates({"name": "cosine", "T_max": 2, "eta_min": 0.5})[2:] == [0.5] * (ROUNDS - 2)
    assert math.isclose(rates({"name": "linear", "total_iters": 2})[-1], 0.2)
