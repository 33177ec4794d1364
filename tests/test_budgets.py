"""Clients with budgets of their own."""

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

import fedsim
from fedsim.experiment import load_experiment
from fedsim.run_directory import RunDirectory
from fedsim.verification import verify_run

TARGETS = {client: 0.5 + 7.5 * client / 19 for client in range(20)}
EXPERIMENT: dict[str, Any] = {
    "name": "budgets",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 20}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 2, "batch_size": 16},
    "privacy": {
        "target_epsilon": 8.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "clients": {str(client): {"target_epsilon": value} for client, value in TARGETS.items()},
    },
}


def recomputed(client: dict[str, Any]) -> float:
    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4
    )
    for entry in client["ledger"]:
        event = dp_accounting.GaussianDpEvent(entry["event"]["event"]["noise_multiplier"])
        sampled = dp_accounting.PoissonSampledDpEvent(entry["event"]["sampling_rate"], event)
        accountant.compose(sampled, entry["count"])
    return accountant.get_epsilon(client["delta"])


def test_no_client_exceeds_its_own_target(tmp_path: Path) -> None:
    """Twenty clients with targets from 0.5 to 8, recomputed by dp-accounting from the ledger."""
    run = fedsim.run(EXPERIMENT, out=tmp_path / "r").path
    clients = json.loads((run / "privacy.json").read_text())["clients"]
    noise = [client["noise_multiplier"] for client in clients]
    for client in clients:
        target = TARGETS[client["client"]]
        assert client["target_epsilon"] == target
        assert target - 1e-2 < client["epsilon"] <= target
        assert recomputed(client) <= target + 1e-3
    # Clients of one size need less noise for a larger budget.
    sizes = {client["examples"] for client in clients}
    for size in sizes:
        same = [n for n, client in zip(noise, clients, strict=True) if client["examples"] == size]
        assert same == sorted(same, reverse=True)
    assert verify_run(RunDirectory.open(run)).problems == ()


def test_a_client_keeps_what_is_everybodys(tmp_path: Path) -> None:
    own = {"1": {"noise_multiplier": 2.0}, "2": {"delta": 1e-4, "max_grad_norm": 0.1}}
    result = fedsim.run(EXPERIMENT, overrides={"privacy.clients": own}, out=tmp_path / "r")
    assert result.privacy is not None
    first, second, third, fourth = result.privacy.clients[:4]
    assert (second.noise_multiplier, second.target_epsilon) == (2.0, None)
    assert (third.delta, third.max_grad_norm, third.target_epsilon) == (1e-4, 0.1, 8.0)
    assert third.noise_multiplier > first.noise_multiplier
    assert fourth.noise_multiplier == first.noise_multiplier


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"20": {"delta": 1e-4}}, "privacy.clients.20: there is no such client; they are 0 to 19"),
        ({"all": {"delta": 1e-4}}, "clients: 'all' is not a client number"),
        ({"01": {"delta": 1e-4}}, "clients: '01' is not a client number"),
        (
            {"1": {"target_epsilon": 1.0, "noise_multiplier": 1.0}},
            "takes target_epsilon or noise_multiplier, got both",
        ),
        ({"1": {"target_epsilonn": 1.0}}, "did you mean 'target_epsilon'"),
        ({"1": {"delta": 2}}, "privacy.clients.1.delta: must be < 1, got 2"),
    ],
)
def test_impossible_budgets_are_refused(clients: dict[str, Any], message: str) -> None:
    with pytest.raises(fedsim.ExperimentError) as caught:
        load_experiment(EXPERIMENT, {"privacy.clients": clients})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
