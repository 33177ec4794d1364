"""What private federations learn with the shipped recipe, on data that tuning did not see."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
EXPERIMENTS = ROOT / "experiments"
RECORDED = ROOT / "tests" / "comparison" / "compare_digits.csv"
LEAST = {"eps-8": 0.965, "eps-4": 0.955, "eps-2": 0.935, "eps-1": 0.90}
pytestmark = pytest.mark.skipif(not EXPERIMENTS.exists(), reason="reads a checkout's experiments")


def linear(*features: object, lr: float) -> dict[str, object]:
    """The changes that make an experiment one of the shipped recipe."""
    return {
        "model.name": "logistic",
        "model.args": {"bias": False, "init": "zeros"},
        "model.features": list(features),
        "federation.weighting": {"name": "examples_over_noise"},
        "local": {"steps": 1, "batch_size": "full", "optimizer": {"name": "sgd", "lr": lr}},
    }


def test_the_recorded_comparison_reaches_its_accuracies_over_twenty_seeds() -> None:
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    for name, least in LEAST.items():
        found = [float(row["test_accuracy"]) for row in rows if row["variant"] == name]
        assert len(found) == 20
        assert np.mean(found) >= least


@pytest.mark.slow
def test_the_partition_does_not_matter(accuracies) -> None:
    """At ε = 1, against the recorded runs of the same seeds, whose partition is skewed."""
    with RECORDED.open() as file:
        rows = {row["seed"]: row for row in csv.DictReader(file) if row["variant"] == "eps-1"}
    iid = accuracies(
        EXPERIMENTS / "digits_dp.yaml",
        range(2),
        privacy__target_epsilon=1,
        local__optimizer__lr=100,
        data__partition={"scheme": "iid", "num_clients": 10},
    )
    skewed = [float(rows[str(seed)]["test_accuracy"]) for seed in range(2)]
    assert min(iid) >= 0.90
    assert abs(np.mean(iid) - np.mean(skewed)) <= 0.03


@pytest.mark.parametrize(
    ("task", "clients", "seeds", "rates", "features", "least"),
    [
        pytest.param(
            *("breast_cancer", 10, 3, {1: 60}, [{"center": 0.3}, "unit_norm"], {1: 0.89}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("breast_cancer", 10, 24, {8: 300, 1: 60}, [{"center": 0.3}, "unit_norm"]),
            {8: 0.941, 1: 0.929},
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("mixture", 100, 2, {8: 500, 1: 400}),
            ["unit_norm", {"random_fourier": {"gamma": 0.5}}],
            {8: 0.705, 1: 0.634},
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_recipe_suits_other_tasks(
    accuracies,
    tmp_path: Path,
    task: str,
    clients: int,
    seeds: int,
    rates: dict[int, float],
    features: list[object],
    least: dict[int, float],
) -> None:
    """Accuracies at ε = 8 and 1; the small network has 92.5 and 84.2, 61 and 52 % (one release)."""
    shutil.copy(Path(__file__).parent / "tasks.py", tmp_path)
    base = tmp_path / "base.yaml"
    base.write_text(
        f"name: {task}\n"
        f"data: {{dataset: './tasks.py:{task}', "
        f"partition: {{scheme: iid, num_clients: {clients}}}}}\n"
        "model: {name: mlp}\n"
        "federation: {rounds: 20}\n"
        "local: {steps: 1, batch_size: full}\n"
        "privacy: {target_epsilon: 8, delta: 1.0e-3, max_grad_norm: 0.1}\n"
    )
    for budget, rate in rates.items():
        changes = {"privacy.target_epsilon": budget, **linear(*features, lr=rate)}
        assert np.mean(accuracies(base, range(seeds), **changes)) >= least[budget]
