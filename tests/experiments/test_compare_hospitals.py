"""experiments/compare_hospitals.yaml: what it compares, what it reached, and the page about it."""

import csv
import re
from pathlib import Path

import pytest

from fedsim.comparison.load import load_comparison
from fedsim.comparison.statistics import Estimate, paired_difference, t_interval
from fedsim.comparison.text import interval_text

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "compare_hospitals.yaml"
PAGE = ROOT / "docs" / "howto" / "hospitals.md"
RECORDED = ROOT / "tests" / "comparison" / "compare_hospitals.csv"
METRIC = "test_group_accuracy"
HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads the experiments of a checkout")


def recorded() -> dict[str, dict[str, list[float]]]:
    """Accuracies of the recorded runs, by variant and column, in the order of the seeds."""
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: {
            column: [float(row[column]) for row in rows if row["variant"] == name]
            for column in (METRIC, *HOSPITALS)
        }
        for name in dict.fromkeys(row["variant"] for row in rows)
    }


def difference(first: str, second: str) -> Estimate:
    values = recorded()
    return paired_difference(values[first][METRIC], values[second][METRIC]).estimate


def test_it_has_every_trust_model_at_three_targets_and_each_hospital_alone() -> None:
    loaded = load_comparison(FILE)
    assert loaded.seeds == tuple(range(20))
    found = {
        (experiment.federation.algorithm.name, privacy.trust.name, clients, privacy.target_epsilon)
        for variant in loaded.variants
        for experiment in [variant.experiment]
        for clients in [experiment.data.partition.num_clients]
        for privacy in [experiment.privacy]
        if privacy is not None
    }
    kinds = [("fedavg", trust, None) for trust in ("local", "distributed", "central")]
    kinds += [("fedavg", "local", 1), ("local_only", "local", None)]
    assert found == {(*kind, target) for kind in kinds for target in (1.0, 0.3, 0.1)}
    plain = {variant.name for variant in loaded.variants if "plain" in variant.name}
    assert plain == {"plain", "alone-plain"}


@pytest.mark.parametrize(("variant", "least"), [("local-1", 0.75), ("local-0.3", 0.73)])
def test_the_recorded_runs_reach_the_accuracy_that_was_the_goal(variant: str, least: float) -> None:
    values = recorded()[variant][METRIC]
    assert len(values) == 20
    low = t_interval(values).low
    assert low is not None
    assert low >= least


def test_the_page_has_the_recorded_means_and_intervals() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[1:]
        for line in page.splitlines()
        if "±" in line and line.startswith("| ")
        for cells in [[cell.strip(" `") for cell in line.strip("| ").split(" | ")]]
    }
    assert rows == {
        name: [
            interval_text(METRIC, t_interval(values)).replace("%", " %")
            for values in columns.values()
        ]
        for name, columns in recorded().items()
    }
    differences = re.findall(r"(\d\.\d ± \d\.\d)\s+points better", page)
    for shown, pair in zip(
        differences, [("alone-1", "local-1"), ("distributed-0.1", "alone-0.1")], strict=True
    ):
        assert interval_text(METRIC, difference(*pair)).replace("%", "") == shown
    assert f"{-100 * difference('local-1', 'plain').mean:.1f} points to `plain`" in page
    costs = [-100 * difference(f"{name}-0.1", "plain").mean for name in ("local", "distributed")]
    assert f"cost {costs[0]:.1f} points, shares {costs[1]:.1f}" in page
