"""What runs share is checked, not assumed."""

from pathlib import Path

import numpy as np
import pytest

from fedsim.comparison.differences import SHARED_PARTS, check_pairs, pair_digests
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble


def digests(directory: Path, **overrides: object) -> dict[str, str]:
    loaded = load_experiment(directory / "tiny.yaml", {"privacy": None, **overrides})
    return pair_digests(assemble(loaded, ledger=None))


@pytest.mark.parametrize(
    ("overrides", "differing"),
    [
        ({"local.optimizer.lr": 0.1}, set()),
        ({"privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0}}, set()),
        ({"data.partition.num_clients": 4}, {"data", "participants"}),
        ({"model": {"name": "mlp"}}, {"initial_model"}),
        ({"federation.clients_per_round": 2}, {"participants"}),
        ({"seed": 1}, {"data", "initial_model"}),  # all clients take part in every round
    ],
)
def test_a_digest_differs_exactly_where_a_setting_changes_the_part(
    directory: Path, overrides: dict[str, object], differing: set[str]
) -> None:
    before, after = digests(directory), digests(directory, **overrides)
    assert {part for part in SHARED_PARTS if before[part] != after[part]} == differing


SAME = {"data": "a", "initial_model": "b", "participants": "c"}
PAIRS = [("dp", "base"), ("x", "base")]


def test_variants_that_share_everything_are_paired() -> None:
    found = check_pairs({"base": {0: SAME, 1: SAME}, "dp": {0: SAME}, "x": {1: SAME}}, PAIRS)
    assert found.is_paired
    assert found.checked == 2
    assert "Checked in all 2 pairs of runs" in found.statement


def test_a_part_that_differs_is_named_with_its_variant() -> None:
    other = {**SAME, "data": "z", "initial_model": "y"}
    found = check_pairs({"base": {0: SAME, 1: SAME}, "dp": {0: SAME, 1: other}}, PAIRS)
    assert not found.is_paired
    assert found.differences == {"dp": ("data", "initial_model")}
    parts = "data (partitions, features, test set) and initial model"
    assert f"dp differs in its {parts}" in found.statement


def test_nothing_to_pair_is_not_called_paired() -> None:
    found = check_pairs({"base": {0: SAME}, "dp": {1: SAME}}, PAIRS)
    assert not found.is_paired
    assert found.statement.startswith("No seed finished both")


def test_secret_draws_of_clients_are_not_on_record() -> None:
    from dataclasses import replace
    from types import SimpleNamespace

    from fedsim.comparison.differences import _digest
    from fedsim.experiment import load_experiment
    from fedsim.federation.assembly import assemble

    experiment = {
        "name": "secret",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 5}},
        "model": {"name": "logistic"},
        "federation": {
            "rounds": 3,
            "clients_per_round": 2,
            "participation": {"scheme": "poisson"},
        },
        "local": {"steps": 1, "batch_size": 8},
        "privacy": {
            "trust": "central",
            "unit": "client",
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "max_update_norm": 1.0,
        },
    }
    federation = assemble(load_experiment(experiment), ledger=None)
    nobody = SimpleNamespace(on_record=lambda number: ())
    steps = replace(federation.plan.steps, participation=nobody)
    hidden = replace(federation, plan=replace(federation.plan, steps=steps))
    assert pair_digests(federation)["participants"] == pair_digests(hidden)["participants"]
    assert pair_digests(federation)["participants"] == _digest(np.array(()) for _ in range(3))
