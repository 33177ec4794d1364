"""FedProx against FedAvg on Synthetic(1, 1) (Li et al. 2020)."""

from statistics import fmean, stdev
from typing import Any

from experiments.reproductions.rows import Row, Unit, context_row, order_row
from experiments.reproductions.runs import VariantRuns, run_variants
from experiments.reproductions.study import Setup, Study
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.statistics import t_interval

HEADLINE = 0.22  # mean gain in accuracy over five data sets at 90 % stragglers
LAST_SHARE = 0.1  # of the rounds, whose mean is compared: single rounds go up and down
REDUCED: dict[str, Any] = {"federation.rounds": 20}


def last_rounds(runs: VariantRuns, metric: str) -> list[float]:
    """Return the mean of a metric over the last rounds of each run."""
    return [fmean(_last(one, metric)) for one in runs.outcomes]


def last_swings(runs: VariantRuns, metric: str) -> list[float]:
    """Return the standard deviation of a metric over the last rounds of each run."""
    return [stdev(_last(one, metric)) for one in runs.outcomes]


def _last(run: RunOutcome, metric: str) -> list[float]:
    values = [float(row[metric]) for row in run.rounds]
    return values[-max(2, round(LAST_SHARE * len(values))) :]


def measure(setup: Setup) -> list[Row]:
    """Return the order of the losses, and the spread from round to round."""
    changes = REDUCED if setup.size == "reduced" else {}
    runs = run_variants("fedprox_compare.yaml", setup, changes=changes)
    losses = {name: last_rounds(one, "test_loss") for name, one in runs.items()}
    swings = {name: last_swings(one, "test_loss") for name, one in runs.items()}
    percent = Unit(scale=100, digits=1, suffix=" %")
    accuracies = {name: last_rounds(one, "test_accuracy") for name, one in runs.items()}
    rows = [
        order_row(
            "no stragglers: loss of FedProx minus that of FedAvg",
            "smaller",
            losses["fedprox"],
            losses["fedavg"],
            larger=False,
        ),
        order_row(
            "no stragglers: deviation of the loss from round to round, FedProx minus FedAvg",
            "smaller",
            swings["fedprox"],
            swings["fedavg"],
            larger=False,
        ),
    ]
    for share in (50, 90):
        gain = f", {percent.text(HEADLINE, signed=True)} on average of five data sets"
        pair = f"fedprox-{share}", f"fedavg-{share}"
        rows += [
            order_row(
                f"{share} % stragglers: accuracy of FedProx, which keeps partial work, minus "
                "that of FedAvg, which drops it",
                "larger" + (gain if share == 90 else ""),
                accuracies[pair[0]],
                accuracies[pair[1]],
                larger=True,
                unit=percent,
            ),
            order_row(
                f"{share} % stragglers: loss of FedProx minus that of FedAvg",
                "smaller",
                losses[pair[0]],
                losses[pair[1]],
                larger=False,
            ),
        ]
    for name in runs:
        accuracy = percent.interval(t_interval(accuracies[name]))
        rows.append(context_row(f"test accuracy of {name}", accuracy))
    return rows


SETTINGS = (
    "As published: Synthetic(1, 1), 30 users, 10 in each of 200 rounds, 20 local epochs in "
    "batches of 10, learning rate 0.01, μ = 1, weights by size, a tenth of the examples for the "
    "test, no, half or nine tenths of a round's users as stragglers, which take a random part of "
    "their steps. Loss and accuracy are those of the test examples, means over the last tenth of "
    "the rounds; the paper plots the training loss. At reduced size 20 rounds."
)

STUDIES = {
    "fedprox": Study(
        title="FedProx on heterogeneous users",
        source="Li et al. 2020, arXiv:1812.06127, figures 1 and 2",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 3, "full": 5},
    )
}
