"""The speed duel of FLUTE: logistic regression on MNIST, with the user's files.

Read at commit 8bfe085 of github.com/microsoft/msrflute; files and lines in `SETTINGS` are of that
commit.
"""

from statistics import median

from experiments.reproductions.rows import Row, Unit, context_row, limit_row, number_row
from experiments.reproductions.runs import run_variants
from experiments.reproductions.study import NeededFile, Setup, Study
from fedsim.comparison.statistics import t_interval

FLUTE_SECONDS, FLOWER_SECONDS = 200.0, 1814.0  # README.md:56: 3:20 and 30:14 on a processor
ACCURACY = 0.80  # README.md:56
REDUCED = {"federation.rounds": 20}
SETTINGS = (
    "As published (README.md:24): 1,000 clients, 10 in each of 100 rounds, one pass in batches "
    "of 10, learning rate 0.03, a sigmoid before the softmax "
    "(experiments/cv_lr_mnist/model.py:18-21), two digits for each client (of FedProx: d2a4501, "
    "data/mnist/generate_niid.py:33-40). Not as published: another processor, so the times show "
    "an order of magnitude; clients of about equal size; the model is tested after every round "
    "instead of every 20 (config.yaml:33). The published accuracy is a rounded '~80'. At reduced "
    "size 20 rounds, and times are those of 20."
)


def measure(setup: Setup) -> list[Row]:
    """Return time and accuracy."""
    changes = {"data.args.path": str((setup.data / "mnist").absolute())}
    is_full = setup.size == "full"
    runs = run_variants(
        "lr_mnist_compare.yaml", setup, changes=changes if is_full else {**changes, **REDUCED}
    )
    plain, private = runs["plain"], runs["private"]
    seconds, unit = median(plain.seconds()), Unit(digits=1, suffix=" s")
    rows = [
        limit_row("seconds of FLUTE", FLUTE_SECONDS, seconds, unit=unit),
        limit_row("seconds of Flower 1.0", FLOWER_SECONDS, seconds, unit=unit),
        context_row(
            "seconds with DP-SGD, ε = 8 in each client", unit.text(median(private.seconds()))
        ),
    ]
    if is_full:
        accuracy = t_interval(plain.metric("test_accuracy"))
        percent = Unit(scale=100, digits=1, suffix=" %")
        rows.append(number_row("test accuracy", ACCURACY, accuracy, tolerance=0.03, unit=percent))
    return rows


STUDIES = {
    "lr_mnist": Study(
        title="The speed duel: logistic regression on MNIST",
        source="FLUTE, README of its repository",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 1, "full": 3},
        files=(NeededFile(path="mnist/train-images*", origin="the official files"),),
    )
}
