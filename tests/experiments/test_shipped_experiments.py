"""Shipped experiments are valid, and run without a lost update, a warning or a hidden time."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import fedsim
from fedsim.comparison.load import load_comparison
from fedsim.experiment import load_experiment
from fedsim.report.progress import ProgressCallback
from fedsim.report.terminal import print_result
from fedsim.runs.directory import RunDirectory

FOLDER = Path(__file__).parents[2] / "experiments"
COMPARISONS = sorted([*FOLDER.glob("compare_*.yaml"), FOLDER / "parameters.yaml"])
EXPERIMENTS = sorted(set(FOLDER.glob("*.yaml")) - set(COMPARISONS))

# Rounds in the slow stage of those that take many seconds; the long stage has all of their rounds.
SHORTER = {
    "digits_distributed_mlp": 20,
    "digits_mlp": 30,
    "digits_skewed": 10,
    "digits_zeroth_order": 4,
    "many_users": 4,
    "movielens": 2,  # test_compare_movielens.py has all rounds
    "users_ftrl": 40,
}
SHIPPED = [
    *(
        pytest.param(path, SHORTER.get(path.stem), id=path.stem, marks=pytest.mark.slow)
        for path in EXPERIMENTS
    ),
    *(
        pytest.param(FOLDER / f"{name}.yaml", None, id=f"{name}, whole", marks=pytest.mark.long)
        for name in SHORTER
    ),
]

# The licence of its ratings keeps them out of every extra.
CHANGES = {"movielens": {"data.dataset": "movielens_small", "model.args.films": 9066}}


def recorded_accuracy_of_mnist() -> float:
    """Return that of the recorded run with the same settings."""
    with (Path(__file__).parents[1] / "comparison" / "compare_mnist5k.csv").open() as file:
        (row,) = (
            row for row in csv.DictReader(file) if (row["variant"], row["seed"]) == ("local-1", "0")
        )
    return float(row["test_accuracy"])


def named(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", EXPERIMENTS, ids=named)
def test_a_shipped_experiment_is_valid(path: Path) -> None:
    load_experiment(path)


@pytest.mark.parametrize("path", COMPARISONS, ids=named)
def test_a_shipped_comparison_is_valid(path: Path) -> None:
    load_comparison(path)


@pytest.mark.parametrize(("path", "rounds"), SHIPPED)
def test_a_shipped_experiment_runs_without_loss_or_warning(
    path: Path, rounds: int | None, tmp_path: Path
) -> None:
    printed = Console(file=io.StringIO(), width=500)
    changes = {} if rounds is None else {"federation.rounds": rounds}
    fedsim.run(
        path,
        overrides={**CHANGES.get(path.stem, {}), **changes},
        out=tmp_path / "run",
        callback=ProgressCallback(printed),
    )
    directory = RunDirectory(tmp_path / "run")
    print_result(directory, printed, waited=12.0)

    rows = [json.loads(line) for line in directory.rounds.read_text().splitlines()]
    assert rows
    assert [row["failed"] for row in rows] == [[]] * len(rows)
    assert isinstance(printed.file, io.StringIO)
    text = printed.file.getvalue()
    assert "warning" not in text
    accuracy = rows[-1].get("test_accuracy")
    if path.stem == "mnist5k":  # four of 1,000 images: other processors add in another order
        assert accuracy == pytest.approx(recorded_accuracy_of_mnist(), abs=0.004)
    elif path.stem == "digits_distributed":  # test_trust_experiments.py has more seeds
        assert accuracy >= 0.94
    times = [row["seconds"] for row in rows]
    assert min(times) > 0 or "in 12.0 s (times are not recorded, as they would tell" in text
