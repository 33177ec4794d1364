"""experiments/compare_mnist5k.yaml: what it compares, what it reached, and the page about it.

One of its runs is performed again in test_shipped_experiments.py.
"""

import csv
from pathlib import Path

import pytest

from fedsim.comparison.load import load_comparison
from fedsim.comparison.statistics import t_interval
from fedsim.comparison.text import interval_text

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "compare_mnist5k.yaml"
PAGE = ROOT / "docs" / "howto" / "accuracy.md"
RECORDED = ROOT / "tests" / "comparison" / "compare_mnist5k.csv"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads the experiments of a checkout")


def recorded() -> dict[str, list[float]]:
    """Test accuracies of the recorded runs, by variant, in the order of the seeds."""
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: [float(row["test_accuracy"]) for row in rows if row["variant"] == name]
        for name in dict.fromkeys(row["variant"] for row in rows)
    }


def test_it_has_every_trust_model_at_two_targets_one_holder_and_clients_alone() -> None:
    loaded = load_comparison(FILE)
    assert loaded.seeds == tuple(range(20))
    compared = {
        (variant.arm, privacy.trust.name, privacy.target_epsilon)
        for variant in loaded.variants
        for privacy in [variant.experiment.privacy]
        if privacy is not None
    }
    kinds = [(None, trust) for trust in ("local", "distributed", "central")]
    kinds += [("pooled", "local"), ("local_only", "local")]
    assert compared == {(*kind, target) for kind in kinds for target in (1.0, 3.0)}


@pytest.mark.parametrize(("variant", "least"), [("local-1", 0.91), ("local-3", 0.94)])
def test_the_recorded_runs_reach_the_accuracy_that_was_the_goal(variant: str, least: float) -> None:
    accuracies = recorded()[variant]
    assert len(accuracies) == 20
    low = t_interval(accuracies).low
    assert low is not None
    assert low >= least


def test_the_page_has_the_recorded_means_and_intervals() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = {name: interval_text("test_accuracy", t_interval(a)) for name, a in recorded().items()}
    assert f"Without privacy: {shown.pop('non-private')}" in page
    for kind in dict.fromkeys(name.rpartition("-")[0] for name in shown):
        assert f"| `{kind}`: " in page
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{kind}`: "))
        assert row.endswith(f" | {shown[f'{kind}-3']} | {shown[f'{kind}-1']} |")
