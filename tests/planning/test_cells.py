"""`fedsim plan` names every trust model and unit: its noise, its ε, or why it cannot run."""

import math
from typing import Any

import pytest

from fedsim.accountant import Gaussian, PldAccountant
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.experiment import load_experiment
from fedsim.planning.alternatives import CELLS, PlannedCell
from fedsim.planning.projection import Plan, plan_experiment

EXPERIMENT: dict[str, Any] = {
    "name": "cells",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 4, "min_examples": 20},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 4, "weighting": "examples"},
    "local": {"steps": 1, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 1.0}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-3, "max_grad_norm": 0.5},
    "secure_aggregation": {"protocol": "additive", "min_clients": 4},
}
STRICT = {"privacy.clients": {"2": {"target_epsilon": 1.0}}}


def planned(**overrides: Any) -> Plan:
    return plan_experiment(load_experiment(EXPERIMENT, overrides))


def cell(plan: Plan, trust: str, unit: str = "example") -> PlannedCell:
    return next(one for one in plan.cells if (one.trust, one.unit) == (trust, unit))


def gaussian_epsilon(noise: float, releases: int) -> float:
    account = PldAccountant()
    account.compose(Gaussian(noise), count=releases)
    return epsilon_with_slack(account.get_epsilon, 1e-3)


def test_every_cell_is_there_once_and_the_files_own_is_marked() -> None:
    plan = planned()
    assert [(one.trust, one.unit) for one in plan.cells] == list(CELLS)
    assert [one.is_own for one in plan.cells].count(True) == 1
    assert cell(plan, "local").is_own


def test_shares_are_the_noise_over_the_root_of_honest_clients() -> None:
    plan = planned()
    local, shared, central = (cell(plan, one) for one in ("local", "distributed", "central"))
    noises = [[client.noise_multiplier for client in one.clients] for one in (local, shared)]
    z, share = max(noises[0]), min(noises[1])  # that of the largest batch
    assert shared.honest == 3  # 4 in the smallest sum, 1 of them colluding
    assert share * math.sqrt(3) == pytest.approx(z, rel=1e-9)
    assert min(client.noise_multiplier for client in central.clients) == pytest.approx(z, rel=1e-9)
    assert shared.epsilon("sums") == shared.epsilon("models") == pytest.approx(2.0, abs=1e-3)
    assert shared.epsilon("server") == pytest.approx(gaussian_epsilon(share, 4), rel=3e-3)
    assert [local.epsilon(name) for name in ("server", "sums", "models")] == [
        plan.system_epsilon
    ] * 3
    assert [central.epsilon(name) for name in ("server", "sums")] == [None, None]
    assert central.epsilon("models") == pytest.approx(2.0, abs=1e-3)


def test_the_strictest_client_sets_the_share_and_others_get_less_epsilon() -> None:
    shared = cell(planned(**STRICT), "distributed")
    assert shared.strictest == (2,)
    spent = {one.client: one.epsilon["sums"] for one in shared.clients}
    assert spent[2] == pytest.approx(1.0, abs=1e-3)
    assert all(spent[client] < 1.01 for client in spent)  # weights by size: equal scales


def test_a_limit_against_the_server_raises_the_share() -> None:
    changes = {
        "privacy.trust": "distributed",
        "privacy.trust.fallback_epsilon": 3.0,
        "privacy.trust.colluding_clients": 1,
    }
    shared = cell(planned(**changes), "distributed")
    assert shared.epsilon("server") == pytest.approx(3.0, abs=1e-3)
    assert (shared.epsilon("sums") or 9.0) < 2.0
    spent = [one.epsilon["server"] for one in shared.clients]
    assert max(spent) - min(spent) < 0.01  # all but the rounding of their sums
    assert cell(planned(**changes), "local").reason is None  # its keys go with it


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secure_aggregation": None}, "privacy.trust: distributed protects from those who see"),
        ({"local.steps": 2}, "local.steps: must be 1 with trust: distributed"),
        ({"secure_aggregation": {"protocol": "additive"}}, "needs min_clients in the file"),
    ],
)
def test_a_cell_that_cannot_run_names_its_first_rule(changes: dict[str, Any], reason: str) -> None:
    shared = cell(planned(**changes), "distributed")
    assert reason in (shared.reason or "")
    assert shared.to_json()["reason"] == shared.reason
    assert not shared.clients


def test_the_table_has_a_line_for_each_cell(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from fedsim.report.plan_terminal import print_plan

    print_plan(planned(**STRICT, **{"local.steps": 1}), Console(width=80))
    text = " ".join(capsys.readouterr().out.split())
    assert "example local * each client" in text
    assert "example distributed each a share" in text
    assert "the strictest claim, of client 2, sets every client's share" in text
    assert "3 honest shares" in text
    for trust in ("local", "distributed", "central"):
        assert f"client {trust}" in text or f"client, {trust}: cannot run: " in text
