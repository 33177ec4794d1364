"""experiments/compare_movielens.yaml: what it reached, and the page about it."""

import csv
from pathlib import Path

import pytest

from fedsim.comparison.load import load_comparison
from fedsim.comparison.statistics import paired_difference, t_interval
from fedsim.comparison.text import difference_text, interval_text

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
FILE = EXPERIMENTS / "compare_movielens.yaml"
PAGE = ROOT / "docs" / "howto" / "users.md"
METRIC = "test_rmse"
SMALL = {"data__dataset": "movielens_small", "model__args__films": 9066}
ONE_NUMBER = {
    **SMALL,
    "model__args__films": 1,
    "data__partition": {"scheme": "iid", "num_clients": 1},
    "privacy": None,
    "federation": {"rounds": 30},
    "local__optimizer__lr": 0.4,
}
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads the experiments of a checkout")


def recorded() -> dict[str, list[dict[str, str]]]:
    """The rows of comparison.csv, by variant."""
    with (ROOT / "tests" / "comparison" / "compare_movielens.csv").open() as file:
        rows = list(csv.DictReader(file))
    variants = dict.fromkeys(row["variant"] for row in rows)
    return {name: [row for row in rows if row["variant"] == name] for name in variants}


def errors(variant: str) -> list[float]:
    return [float(row[METRIC]) for row in recorded()[variant]]


def test_the_recorded_runs_are_those_of_the_file() -> None:
    loaded = load_comparison(FILE)
    assert list(recorded()) == [variant.name for variant in loaded.variants]
    for variant in loaded.variants:
        rows, privacy = recorded()[variant.name], variant.experiment.privacy
        assert [int(row["seed"]) for row in rows] == list(loaded.seeds) == list(range(20))
        if privacy is not None:
            assert {row["unit"] for row in rows} == {"client"}
            assert max(float(row["epsilon"]) for row in rows) <= (privacy.target_epsilon or 0)


def test_whole_users_at_epsilon_4_reach_the_error_that_was_the_goal() -> None:
    high = t_interval(errors("central-4")).high
    assert high is not None
    assert high <= 1.06


def test_the_page_shows_the_recorded_means_and_differences() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for name in recorded():
        shown = next(line for line in lines if line.startswith(f"| `{name}`"))
        cells = [interval_text(METRIC, t_interval(errors(name)))]
        if name != "plain":
            difference = paired_difference(errors(name), errors("plain")).estimate
            cells.append(difference_text(METRIC, difference))
        assert shown.strip("| ").split(" | ")[1:] == cells


@pytest.mark.slow
def test_private_scores_of_films_beat_one_number_without_privacy(accuracies) -> None:
    """On the ratings that come with the extra `data`."""
    private = accuracies(EXPERIMENTS / "movielens.yaml", [0], METRIC, **SMALL)
    constant = accuracies(EXPERIMENTS / "movielens.yaml", [0], METRIC, **ONE_NUMBER)
    assert private[0] < constant[0] - 0.005
