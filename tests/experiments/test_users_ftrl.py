"""The shipped experiments on whole clients with correlated noise compare at one ε, and gain."""

import csv
from pathlib import Path
from typing import Any

import pytest

from fedsim.comparison.load import load_comparison
from fedsim.comparison.statistics import paired_difference, t_interval
from fedsim.comparison.text import difference_text, interval_text
from fedsim.experiment import load_experiment
from fedsim.runs.runner import run_experiment

ROOT = Path(__file__).parent.parent.parent
EXPERIMENTS = ROOT / "experiments"
pytestmark = pytest.mark.skipif(not EXPERIMENTS.exists(), reason="reads the files of a checkout")


def test_the_comparison_changes_noise_and_draws_of_clients_alone() -> None:
    loaded = load_comparison(EXPERIMENTS / "compare_users_ftrl.yaml")
    chosen, rest = dict[str, tuple[str, object]](), list[dict[str, Any]]()
    for variant in loaded.variants:
        content = variant.experiment.model_dump(mode="json")
        scheme = content["federation"].pop("participation")["scheme"]
        chosen[variant.name] = (scheme, content["privacy"].pop("noise_correlation"))
        rest.append({key: value for key, value in content.items() if key != "name"})
    assert all(content == rest[0] for content in rest)
    assert rest[0]["privacy"]["target_epsilon"] == 4.0
    assert chosen["poisson"] == ("poisson", "none")
    assert chosen["independent"] == ("min_separation", "none")
    assert {scheme for scheme, _ in chosen.values()} == {"poisson", "min_separation"}


@pytest.mark.parametrize(
    ("comparison", "metric", "epsilon", "cell"),
    [
        ("compare_users_ftrl", "test_accuracy", 4.0, "| `{}`:"),
        ("compare_movielens_ftrl", "test_rmse", 8.0, "| MovieLens, `{}` |"),
    ],
)
def test_the_page_shows_the_recorded_runs_of_the_comparisons(
    comparison: str, metric: str, epsilon: float, cell: str
) -> None:
    with (ROOT / "tests" / "comparison" / f"{comparison}.csv").open() as file:
        rows = list(csv.DictReader(file))
    loaded = load_comparison(EXPERIMENTS / f"{comparison}.yaml")
    values = {
        variant.name: [float(row[metric]) for row in rows if row["variant"] == variant.name]
        for variant in loaded.variants
    }
    assert {len(runs) for runs in values.values()} == {len(loaded.seeds)}
    assert {round(float(row["epsilon"]), 3) for row in rows if row["epsilon"]} == {epsilon}
    page = (ROOT / "docs" / "howto" / "correlated_rounds.md").read_text().splitlines()
    for name, runs in values.items():
        (line,) = (line for line in page if line.startswith(cell.format(name)))
        cells = [interval_text(metric, t_interval(runs))]
        if name != "poisson":
            difference = paired_difference(runs, values["poisson"]).estimate
            cells.append(difference_text(metric, difference))
        assert line.strip("| ").split(" | ")[1:] == cells
    gained = paired_difference(values["blt"], values["poisson"]).estimate
    better = gained.low if metric == "test_accuracy" else gained.high
    assert better is not None
    assert (better > 0) == (metric == "test_accuracy")


def test_two_thousand_rounds_are_charged_as_one_release() -> None:
    experiment = load_experiment(EXPERIMENTS / "users_ftrl.yaml").experiment
    assert experiment.federation.rounds == 2000
    assert experiment.privacy is not None
    noise = experiment.privacy.noise_correlation
    assert noise != "none"
    assert noise.model_dump()["decays"] is not None  # optimised where the file is read


@pytest.mark.slow
def test_correlated_noise_gains_accuracy_at_the_same_epsilon(tmp_path: Path) -> None:
    accuracy = {}
    for noise in ("none", "blt"):
        result = run_experiment(
            EXPERIMENTS / "users_ftrl.yaml",
            overrides={
                "data.args.examples": 1500,
                "data.partition.num_clients": 300,
                "federation.clients_per_round": 5,
                "federation.rounds": 120,
                "privacy.noise_correlation": noise,
            },
            out=tmp_path / noise,
        )
        assert result.privacy is not None
        assert result.privacy.system_epsilon == pytest.approx(4.0, rel=1e-3)
        accuracy[noise] = result.metrics["test_accuracy"]
    assert accuracy["none"] + 0.03 < accuracy["blt"]
