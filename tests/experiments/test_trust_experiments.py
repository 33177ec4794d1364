"""The experiments of trust models and units: what they are, and that they reach their accuracy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.comparison.load import load_comparison
from fedsim.experiment import load_experiment
from fedsim.runs.runner import run_experiment

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
pytestmark = pytest.mark.skipif(
    not EXPERIMENTS.exists(), reason="reads the experiments of a checkout"
)
NEW_KEYS = {"name", "privacy", "secure_aggregation"}


def test_the_distributed_recipe_is_that_of_the_digits_in_another_trust_model() -> None:
    shared = load_experiment(EXPERIMENTS / "digits_distributed.yaml").experiment
    local = load_experiment(EXPERIMENTS / "digits_dp.yaml").experiment
    assert shared.model_dump(exclude=NEW_KEYS) == local.model_dump(exclude=NEW_KEYS)
    assert shared.privacy is not None
    assert shared.secure_aggregation is not None
    assert (shared.privacy.trust.name, shared.privacy.target_epsilon) == ("distributed", 1.0)
    assert (shared.privacy.trust.colluding_clients, shared.secure_aggregation.min_clients) == (
        1,
        10,
    )


def test_the_users_are_compared_at_one_epsilon_and_one_unit() -> None:
    loaded = load_comparison(EXPERIMENTS / "compare_users.yaml")
    assert {one.settings["privacy.unit"] for one in loaded.variants} == {"client"}
    sizes = [one.experiment.data.partition.num_clients for one in loaded.variants]
    assert sizes == [1000, 300, 100, 1000, 1000]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes", "least"),
    [
        ("digits_distributed.yaml", {}, 0.95),
        ("digits_distributed.yaml", {"privacy__target_epsilon": 8.0}, 0.965),
        ("digits_distributed.yaml", {"secure_aggregation__min_clients": 8}, 0.95),
        ("digits_distributed_mlp.yaml", {}, 0.90),
        (
            "digits_distributed_mlp.yaml",
            {"privacy__target_epsilon": 8.0, "local__optimizer__lr": 4.0},
            0.935,
        ),
    ],
)
def test_sums_of_shares_reach_their_accuracy(
    accuracies, name: str, changes: dict[str, Any], least: float
) -> None:
    """Means over seeds that tuning did not see; test_shipped_experiments.py has one seed."""
    assert np.mean(accuracies(EXPERIMENTS / name, range(5), **changes)) >= least


@pytest.mark.slow
def test_more_clients_give_more_accuracy_at_the_same_epsilon(tmp_path: Path) -> None:
    """The shape of McMahan et al. 2018: z and p fixed, so ε is; the mean has less noise."""
    found = {}
    for clients in (100, 1000):
        result = run_experiment(
            EXPERIMENTS / "many_users.yaml",
            overrides={
                "data.args.examples": 10 * clients,
                "data.partition.num_clients": clients,
                "federation.clients_per_round": clients // 10,
                "federation.rounds": 10,
            },
            out=tmp_path / f"{clients}",
        )
        assert result.privacy is not None
        found[clients] = (result.privacy.system_epsilon, result.metrics["test_accuracy"])
    assert found[100][0] == pytest.approx(found[1000][0], rel=1e-4)
    assert found[100][1] + 0.03 < found[1000][1]
