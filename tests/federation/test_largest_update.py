"""The bound of secure sums: no planned update exceeds it, and a smaller one is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsim.clients.local_settings import AdamSettings, OptimizerSettings, SgdSettings
from fedsim.clients.training.shared_model import make_optimizer
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.secure_setup import SecureSetupError
from fedsim.noise.release import normal_tail
from fedsim.runs.runner import run_experiment

EXPERIMENT: dict[str, Any] = {
    "name": "bounds",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 5.0}},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-3, "max_grad_norm": 0.5},
    "secure_aggregation": {"min_clients": 2},
}


def federation(**sections: Any) -> Federation:
    return assemble(load_experiment({**EXPERIMENT, **sections}), ledger=None)


def positions(settings: OptimizerSettings, gradients: np.ndarray) -> list[float]:
    """Return how far the steps have moved one parameter after each of them."""
    value = torch.zeros(1, dtype=torch.float64)
    optimizer, found = make_optimizer(settings), list[float]()
    for gradient in gradients:
        optimizer.step([value], [torch.tensor([gradient], dtype=torch.float64)])
        found.append(abs(float(value)))
    return found


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
)
def test_no_gradients_move_a_parameter_beyond_the_bound(
    gradients: list[float], momentum: float, adam: bool
) -> None:
    settings = (
        AdamSettings(name="adam", lr=0.1)
        if adam
        else SgdSettings(name="sgd", lr=0.1, momentum=momentum)
    )
    bound = settings.largest_change(1.0, len(gradients))
    assert bound is not None
    assert positions(settings, np.array(gradients))[-1] <= bound * (1 + 1e-12)


def test_the_worst_gradients_come_close_to_the_bound() -> None:
    ones = np.ones(40)
    sgd = SgdSettings(name="sgd", lr=0.1, momentum=0.5)
    assert positions(sgd, ones)[-1] > 0.95 * (sgd.largest_change(1.0, 40) or math.inf)
    adam = AdamSettings(name="adam", lr=0.1)
    last = (0.9 / 0.999) ** np.arange(7000)[::-1]  # Cauchy and Schwarz with equality
    before, after = positions(adam, last)[-2:]
    assert after - before > 0.99 * (adam.largest_change(1.0, 1) or math.inf)


def test_weight_decay_has_no_bound() -> None:
    assert SgdSettings(name="sgd", lr=1.0, weight_decay=0.1).largest_change(1.0, 1) is None
    assert AdamSettings(name="adamw", lr=1.0, weight_decay=0.1).largest_change(1.0, 1) is None


@pytest.mark.parametrize("chance", [1e-2, 1e-3])
def test_noise_exceeds_the_tail_as_often_as_allowed(chance: float) -> None:
    # 10^6 draws: a right tail fails with a chance below 1e-8, and one that is 3 % less is rejected.
    draws = np.abs(np.random.default_rng(3).standard_normal(10**6))
    spread = 6.2 * math.sqrt(chance * 1e6)
    assert abs(np.sum(draws > normal_tail(chance)) - chance * 1e6) < spread
    assert np.sum(draws > 0.97 * normal_tail(chance)) - chance * 1e6 > spread


@pytest.mark.parametrize(
    "local",
    [
        {},
        {"batch_size": "full", "steps": 1},
        {"optimizer": {"name": "sgd", "lr": 5.0, "momentum": 0.9}},
        {"optimizer": {"name": "adam", "lr": 0.5}},
        {"lr_schedule": {"name": "step", "step_size": 1}},
    ],
)
def test_no_update_of_a_run_exceeds_the_bound(local: dict[str, Any], tmp_path: Path) -> None:
    content = {**EXPERIMENT, "local": {**EXPERIMENT["local"], **local}}
    planned = assemble(load_experiment(content), ledger=None).plan.largest_update
    assert planned is not None
    assert planned == 2.0 ** round(math.log2(planned))
    result = run_experiment(content, out=tmp_path / "run")
    assert [row["failed"] for row in result.rounds] == [[]] * 2


def test_the_bound_counts_every_aligned_gradient_and_the_noise() -> None:
    one_step = {"steps": 1, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 3.0}}
    silent = federation(local=one_step, privacy={**EXPERIMENT["privacy"], "noise_multiplier": 0.02})
    # All gradients along one coordinate, of clip norm 1/2: an update of 3 / 2, and little noise.
    assert silent.plan.largest_update == 2.0
    loud = federation(local=one_step, privacy={**EXPERIMENT["privacy"], "noise_multiplier": 2000.0})
    sizes = loud.data.clients.sizes
    deviation = 3.0 * 0.5 * 2000.0 / min(sizes)
    assert loud.plan.largest_update is not None
    assert 6.5 * deviation < loud.plan.largest_update < 2.0 * 9.0 * deviation


@pytest.mark.parametrize(
    "sections",
    [
        {"privacy": None},
        {"federation": {"rounds": 4, "strategy": {"name": "fedprox", "proximal_weight": 0.1}}},
        {"secure_aggregation": {"min_clients": 2, "encoding": {"payload": "parameters"}}},
    ],
)
def test_the_usual_bound_stays_where_none_is_known(sections: dict[str, Any]) -> None:
    built = federation(**sections)
    assert built.plan.largest_update is None
    assert built.secure is not None
    assert built.secure.codec.encoder.value_bound == 8.0


def test_a_bound_that_planned_updates_exceed_is_refused_before_the_first_round() -> None:
    small = {"min_clients": 2, "encoding": {"value_bound": 1.0}}
    with pytest.raises(SecureSetupError, match="value_bound is 1, but planned updates may reach"):
        federation(secure_aggregation=small)
    clips = {"min_clients": 2, "encoding": {"value_bound": 1.0, "range_policy": "clip"}}
    assert federation(secure_aggregation=clips).secure is not None
