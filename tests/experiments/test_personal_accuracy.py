"""Personal models on digits: accuracy on clients' own held-out examples, pooled over clients."""

from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parent.parent.parent / "experiments" / "digits_dp.yaml"
TUNED = {"method": "fine_tune", "steps": 50, "lr": 100.0, "holdout": 0.2, "public_data": True}
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads a checkout's experiments")


@pytest.mark.parametrize(
    ("seeds", "epsilon", "lr", "least"),
    [
        pytest.param(2, 1.0, 100.0, 0.93, marks=pytest.mark.slow),
        pytest.param(10, 8.0, 400.0, 0.975, marks=pytest.mark.long),
        pytest.param(10, 1.0, 100.0, 0.95, marks=pytest.mark.long),
    ],
)
def test_fine_tuned_models_on_the_clients_own_examples(
    accuracies, seeds: int, epsilon: float, lr: float, least: float
) -> None:
    """Seeds that the settings of fine-tuning were not chosen on (those were 101 to 103)."""
    changes = {"privacy__target_epsilon": epsilon, "local__optimizer__lr": lr}
    found = accuracies(FILE, range(seeds), "personal_accuracy", **changes, personalization=TUNED)
    assert np.mean(found) >= least, found
