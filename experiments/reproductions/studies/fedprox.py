"""FedProx against FedAvg on Synthetic(1, 1) (Li et al. 2020).

Read at commit d2a4501 of github.com/litian96/FedProx; files and lines in `SETTINGS` are of that
commit.
"""

from statistics import fmean, stdev
from typing import Any

from experiments.reproductions.rows import Row, Unit, context_row, order_row
from experiments.reproductions.runs import VariantRuns, run_variants
from experiments.reproductions.study import Setup, Study
from experiments.reproductions.train_loss import pooled_examples
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.statistics import t_interval

HEADLINE = 0.22  # README.md:9; mean over five data sets at 90 % stragglers
LAST_SHARE = 0.1  # of the rounds, whose mean is compared: single rounds go up and down
REDUCED: dict[str, Any] = {"federation.rounds": 20}


def last_rounds(runs: VariantRuns, metric: str) -> list[float]:
    """Return the mean of a metric over the last rounds of each run."""
    return [fmean(_last(outcome, metric)) for outcome in runs.outcomes]


def last_swings(runs: VariantRuns, metric: str) -> list[float]:
    """Return the standard deviation of a metric over the last rounds of each run."""
    return [stdev(_last(outcome, metric)) for outcome in runs.outcomes]


def _last(run: RunOutcome, metric: str) -> list[float]:
    values = [float(row[metric]) for row in run.rounds]
    return values[-max(2, round(LAST_SHARE * len(values))) :]


def measure(setup: Setup) -> list[Row]:
    """Return the order of the losses, and the spread from round to round."""
    changes = REDUCED if setup.size == "reduced" else {}
    runs = run_variants("fedprox_compare.yaml", setup, changes=changes)
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(len(setup.seeds)):
        pooled = pooled_examples(runs["fedavg"].paths[number])
        for name, variant in runs.items():
            losses[name].append(pooled.loss_of_run(variant.paths[number]))
    swings = {name: last_swings(variant, "test_loss") for name, variant in runs.items()}
    percent = Unit(scale=100, digits=1, suffix=" %")
    accuracies = {name: last_rounds(variant, "test_accuracy") for name, variant in runs.items()}
    rows = [
        order_row(
            "no stragglers: training loss of FedProx minus that of FedAvg",
            "smaller",
            losses["fedprox"],
            losses["fedavg"],
            larger=False,
        ),
        order_row(
            "no stragglers: deviation of the test loss from round to round, FedProx minus FedAvg",
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
                f"{share} % stragglers: training loss of FedProx minus that of FedAvg",
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
    "As published: Synthetic(1, 1), 30 users (data/synthetic_1_1/generate_synthetic.py:11-67), "
    "10 in each of 200 rounds, 20 local epochs in batches of 10, learning rate 0.01 "
    "(run_fedavg.sh), μ = 1 (README.md:133), weights by size (fedbase.py:115-125), a tenth of "
    "the examples for the test, no, half or nine tenths of a round's users as stragglers, which "
    "FedAvg drops (fedavg.py:31-35); the training loss of the last model. Not as published: a "
    "straggler takes a random number of steps, where theirs is one of epochs, 1 to 19 "
    "(fedprox.py:68); new users in each seed, where theirs are one data set; models begin at 0, "
    "theirs at Glorot's. Accuracy is a mean over the last tenth of the rounds, and so is the "
    "deviation. At reduced size 20 rounds."
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
