"""The planned noise of each correlation is that of a run with it, and each has the target ε."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.experiment import load_experiment
from fedsim.noise.correlated.blt import optimised_blt
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.noise.correlated.strategies import TreeStrategy
from fedsim.planning.projection import plan_experiment
from fedsim.report.plan_terminal import print_correlations

VOTES = Path(__file__).parents[2] / "experiments" / "digits_pate.yaml"
EXPERIMENT: dict[str, Any] = {
    "name": "planned",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 60}},
    "model": {"name": "logistic"},
    "federation": {
        "rounds": 40,
        "clients_per_round": 6,
        "participation": {"scheme": "min_separation"},
    },
    "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        **{"trust": "central", "unit": "client", "target_epsilon": 6.0, "delta": 1e-3},
        **{"max_update_norm": 0.5, "noise_correlation": {"name": "blt", "buffers": 2}},
    },
}


def test_the_rows_are_those_of_runs_and_have_the_same_epsilon() -> None:
    planned = {row.noise: row for row in plan_experiment(load_experiment(EXPERIMENT)).correlations}
    runs = {
        "none": {"privacy.noise_correlation": "none"},
        "tree": {"privacy.noise_correlation": "tree"},
        "blt, 2 buffers": {},
    }
    for name, changes in runs.items():
        plan = plan_experiment(load_experiment(EXPERIMENT, overrides=changes), curves=False)
        assert {row.noise: row for row in plan.correlations} == planned
        (noise,) = {client.noise_multiplier for client in plan.clients}
        assert noise == pytest.approx(planned[name].noise_multiplier, rel=1e-4)
    (poisson, *_) = plan_experiment(load_experiment(EXPERIMENT)).correlations
    account = PldAccountant().compose(PoissonSampled(0.1, Gaussian(poisson.noise_multiplier)), 40)
    assert account.get_epsilon(1e-3) == pytest.approx(6.0, rel=1e-3)
    turns = MinSeparation.of(40, 10)
    tree = PldAccountant().compose(
        Gaussian(planned["tree"].noise_multiplier / TreeStrategy(40).sensitivity(turns))
    )
    assert tree.get_epsilon(1e-3) == pytest.approx(6.0, rel=1e-3)
    assert planned["blt, 2 buffers"].error < planned["tree"].error < planned["none"].error


def test_a_target_rho_is_compared_at_the_epsilon_that_it_has() -> None:
    to_rho = {
        "privacy.target_epsilon": None,
        "privacy.accountant": {"name": "pld", "target_rho": 0.5},
    }
    planned = plan_experiment(load_experiment(EXPERIMENT, overrides=to_rho), curves=False)
    (row,) = (row for row in planned.correlations if row.noise == "blt, 2 buffers")
    assert planned.clients[0].noise_multiplier == pytest.approx(row.noise_multiplier, rel=1e-4)


def test_with_momentum_the_models_that_it_makes_are_compared() -> None:
    momentum = {"federation.strategy": {"name": "fedavgm", "momentum": 0.9}}
    experiment = load_experiment(EXPERIMENT, overrides=momentum)
    plan = plan_experiment(experiment, curves=False)
    turns = MinSeparation.of(40, 10)
    rows = {row.noise: row for row in plan.correlations}
    for name, strategy in {
        "tree": TreeStrategy(40),
        "blt, 2 buffers": optimised_blt(2, turns, 0.9),
    }.items():
        row = rows[name]
        variances = [  # a round's update is 0.9 of the one before, plus the release
            steps @ strategy.covariance(40) @ steps
            for after in range(1, 41)
            for steps in [np.array([sum(0.9**j for j in range(after - t)) for t in range(40)])]
        ]
        error = row.noise_multiplier * np.sqrt(np.mean(variances))
        assert row.error == pytest.approx(error, rel=1e-9)
    (noise,) = {client.noise_multiplier for client in plan.clients}
    assert noise == pytest.approx(rows["blt, 2 buffers"].noise_multiplier, rel=1e-4)
    printed = io.StringIO()
    print_correlations(plan.correlations, Console(file=printed, width=120))
    assert "error with momentum 0.9" in printed.getvalue()


@pytest.mark.skipif(not VOTES.exists(), reason="reads the files of a checkout")
def test_votes_have_no_sums_of_rounds() -> None:
    assert plan_experiment(load_experiment(VOTES), curves=False).correlations == ()


def test_half_the_rounds_have_the_noise_of_a_run_with_half_the_rounds() -> None:
    tree = {"privacy.noise_correlation": "tree"}
    whole = plan_experiment(load_experiment(EXPERIMENT, overrides=tree), curves=False)
    (planned,) = (v.noise_multiplier for v in whole.variations if v.change == "half the rounds")
    half = load_experiment(EXPERIMENT, overrides={**tree, "federation.rounds": 20})
    (noise,) = {c.noise_multiplier for c in plan_experiment(half, curves=False).clients}
    assert planned == pytest.approx(noise, rel=1e-4)
    assert planned < 0.9 * whole.clients[0].noise_multiplier


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy.noise_correlation": "none", "privacy.trust": "local"},
        {"privacy.target_epsilon": None, "privacy.noise_multiplier": 2.0},
    ],
)
def test_there_is_no_choice_elsewhere(changes: dict[str, Any]) -> None:
    plan = plan_experiment(load_experiment(EXPERIMENT, overrides=changes), curves=False)
    assert plan.correlations == ()
    assert "correlations" not in plan.to_json()
