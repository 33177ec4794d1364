"""Whole updates as releases: a run, its check, its replay, its resume, and every engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fedsim.accountant import Gaussian
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.mechanisms.plan import PrivacyBudgetError
from fedsim.experiment import load_experiment
from fedsim.experiment.errors import ExperimentError
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "updates",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 8, "alpha": 0.5, "min_examples": 5},
    },
    "model": {"name": "mlp", "args": {"hidden": [40]}},
    "federation": {"rounds": 2, "clients_per_round": 6},
    "local": {
        "steps": 4,
        "batch_size": 8,
        "optimizer": {"name": "adam", "lr": 0.01},
    },
    "privacy": {"unit": "client", "target_epsilon": 10.0, "delta": "auto", "max_update_norm": 0.5},
}


def federation_of(**overrides: Any) -> Federation:
    return assemble(load_experiment(EXPERIMENT, overrides=overrides), ledger=None)


def run(path: Path, **options: Any) -> Path:
    return run_experiment(EXPERIMENT, out=path, **options).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("updates") / "whole")


def test_a_round_is_one_release_and_nothing_else_leaves(whole: Path) -> None:
    path = whole
    privacy = json.loads((path / "privacy.json").read_text())
    assert (privacy["trust"], privacy["unit"], privacy["sampling"]) == ("local", "client", None)
    assert privacy["private"]
    assert "everything that client k has" in privacy["statement"]
    assert {row["examples"] for row in privacy["clients"]} == {None}
    assert {row["delta"] for row in privacy["clients"]} == {1e-2}  # a tenth of 1 / 8, rounded down
    assert privacy["system_epsilon"] <= 10.0
    journal = FileJournal(path / "ledger.jsonl")
    charges = [charge for client in journal.clients() for charge in journal.history(client)]
    assert len(charges) == 12
    for charge in charges:
        ((event, count),) = charge.ledger.entries
        assert isinstance(event, Gaussian)
        assert (count, charge.steps) == (1, 1)
    assert verify_run(RunDirectory.open(path)).problems == ()


def test_rounds_are_budgeted_client_by_client(tmp_path: Path) -> None:
    plans = federation_of(**{"privacy.clients": {"3": {"target_epsilon": 2.0}}}).plan.clients
    assert plans is not None
    assert {plan.planned_steps for plan in plans} <= {1, 2}
    two = [plan for plan in plans if plan.planned_steps == 2]
    own = plans[3].noise_multiplier
    assert all(own > 1.5 * plan.noise_multiplier for plan in two if plan is not plans[3])
    with pytest.raises(PrivacyBudgetError, match="at most 1 of 2 rounds"):
        run_experiment(
            EXPERIMENT,
            overrides={"privacy.noise_multiplier": 0.7, "privacy.target_epsilon": 6.0},
            out=tmp_path / "r",
        )


def test_sizes_of_clients_shape_no_block() -> None:
    for batch_size, rows in ((8, 8), ("full", 64)):
        federation = federation_of(**{"local.batch_size": batch_size})
        blocks = federation.blocks.plan.blocks(1)
        assert max(map(len, blocks)) > 1
        assert {federation.blocks.rows(block) for block in blocks} == {rows}
        assert federation.blocks.places == 4


def test_a_secret_draw_shapes_no_block() -> None:
    draw = {"scheme": "poisson"}
    central = {"trust": "central", "noise": "secure"}
    federation = federation_of(
        **{"federation.participation": draw}, **{f"privacy.{k}": v for k, v in central.items()}
    )
    assert not federation.plan.participation.is_keyed
    blocks = federation.blocks.plan.blocks(1)
    assert sorted(client for block in blocks for client in block) == list(range(8))
    assert federation.blocks.places == 4
    limited = federation_of(**{"local.max_physical_batch": 16})
    assert (limited.blocks.places, limited.blocks.rows((0, 1))) == (2, 8)
    assert federation_of(**{"local.max_physical_batch": 8}).blocks.places is None


@pytest.mark.slow
def test_a_run_is_computed_again_and_resumes_as_it_began(
    whole: Path, tmp_path: Path, stop_after
) -> None:
    assert replay_run(RunDirectory.open(whole)).problems == ()
    run(tmp_path / "part", callback=stop_after(1))
    run(tmp_path / "part", resume=True)
    for name in ("model.safetensors", "privacy.json"):
        assert (tmp_path / "part" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_secure_sums_of_models_are_as_in_clear(
    whole: Path, tmp_path: Path, assert_close_runs
) -> None:
    secure = {"protocol": "additive", "aggregators": 2, "min_clients": 2}
    hidden = run(tmp_path / "s", overrides={"secure_aggregation": secure})
    assert_close_runs(whole, hidden)
    assert verify_run(RunDirectory.open(hidden)).problems == ()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


@pytest.mark.slow
def test_only_trained_values_are_released(tmp_path: Path) -> None:
    path = run(
        tmp_path / "r",
        overrides={
            "model.name": f"{__name__}:batch_norm",
            "model.args": {},
            "local.vectorized_clients": "off",
        },
    )
    values = load_file(path / "model.safetensors")
    before = batch_norm().state_dict()
    for name in ("2.running_mean", "2.running_var", "2.num_batches_tracked"):
        assert torch.equal(torch.from_numpy(values[name]), before[name])


ADD_REMOVE = {"name": "add_remove", "declared_examples": 5}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"privacy.sampling": "shuffle"}, "privacy.sampling: with unit: client"),
    ({"privacy.sampling.rate": 0.1}, "privacy.sampling.rate: with unit: client"),
    ({"privacy.clipping": "per_layer"}, "use clipping: flat or adaptive"),
    ({"privacy.clipping": "automatic"}, "use clipping: flat or adaptive"),
    ({"privacy.adjacency": ADD_REMOVE}, "list of clients; use zero_out or replace_one"),
    ({"federation.weighting": "examples"}, "would reveal client sizes"),
    ({"federation.weighting": "examples_over_noise"}, "size_power: 0"),
    ({"privacy.clients": {"1": {"max_grad_norm": 1.0}}}, "all clients have one max_update_norm"),
    ({"privacy.max_grad_norm": 1.0}, "use max_update_norm"),
    ({"evaluation": {"holdout": 0.2}}, "remove holdout"),
    (
        {"secure_aggregation": {"protocol": "additive", "aggregators": 2, "metrics": {"loss": 9}}},
        "remove metrics",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_has_no_theorem_is_refused_with_its_fix(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load_experiment(EXPERIMENT, overrides=change)
