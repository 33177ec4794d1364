"""DP-SCAFFOLD against DP-FedAvg where users differ (Noble et al. 2022)."""

from functools import partial
from typing import Any

import numpy as np

from experiments.reproductions.rows import Row, Unit, context_row, order_row
from experiments.reproductions.runs import run_variants
from experiments.reproductions.study import Setup, Study
from experiments.reproductions.train_loss import pooled_examples
from fedsim.comparison.statistics import t_interval

# Figures of the authors' repository at round 400 with α = β = 5; K = 5 is not among them.
PUBLISHED = {5: None, 50: "smaller, −0.34", 100: "smaller, −0.39"}
REDUCED: dict[str, Any] = {
    "data.args.users": 30,
    "data.args.examples": 500,
    "federation.rounds": 60,
    "federation.clients_per_round": 6,
    "local.batch_size": 80,
    "privacy.noise_multiplier": 12.0,  # a tenth, as the batches
}


def measure(setup: Setup, *, steps: int) -> list[Row]:
    """Return the order of the training losses after the last round.

    Args:
        setup: size, seeds and directories.
        steps: K, local updates of a client in a round.
    """
    names = (f"fedavg-k{steps}", f"scaffold-k{steps}")
    changes = REDUCED if setup.size == "reduced" else {}
    runs = run_variants("dp_scaffold_compare.yaml", setup, changes=changes, variants=names)
    gaps: dict[str, list[float]] = {name: [] for name in names}
    for number in range(len(setup.seeds)):
        pooled = pooled_examples(runs[names[0]].paths[number])
        least = pooled.least_loss()
        for name in names:
            gaps[name].append(np.log(pooled.loss_of_run(runs[name].paths[number]) - least))
    fedavg, scaffold = (gaps[name] for name in names)
    gap = "log(F(x) − F*) of DP-SCAFFOLD minus that of DP-FedAvg"
    published = PUBLISHED[steps]
    what = f"K = {steps}: {gap}"
    order = order_row(what, published or "", scaffold, fedavg, larger=False)
    accuracy = [runs[name].metric("test_accuracy") for name in names]
    percent = Unit(scale=100, digits=1, suffix=" %")
    return [
        order if published else context_row(what, order.measured),
        context_row(f"K = {steps}: log gap of DP-FedAvg", Unit().interval(t_interval(fedavg))),
        context_row(f"K = {steps}: log gap of DP-SCAFFOLD", Unit().interval(t_interval(scaffold))),
        context_row(
            f"K = {steps}: test accuracy of DP-FedAvg", percent.interval(t_interval(accuracy[0]))
        ),
        context_row(
            f"K = {steps}: test accuracy of DP-SCAFFOLD", percent.interval(t_interval(accuracy[1]))
        ),
    ]


SETTINGS = (
    "As published: Logistic(5, 5), the most heterogeneous of three, 40 features, 10 classes, 100 "
    "users of 5,000 examples of which a fifth is for tests, 20 users a round, batches of a fifth, "
    "400 rounds, clipping at 1, σ = 60 (relative to 2 C, so `noise_multiplier: 120`), inputs of "
    "unit norm, training loss over all users against the best linear model, natural logarithm. "
    "Not as published: one bound for the whole gradient, where the authors' code clips weight and "
    "bias at the median norm of each batch, which no ε covers; no rescaling of inputs by private "
    "ranges; Poisson batches; no rounds that only warm up control variates; a learning rate of 5/K "
    "for both, chosen for DP-FedAvg with a seed that is not reported. At reduced size: 30 users "
    "of 500 examples, 60 rounds, a tenth of the noise."
)


SOURCE = (
    "Noble et al. 2022, arXiv:2111.09278, section 5; sizes of differences read off the figures "
    "pictures/logistic_loss_k_10 and _k_20 of the authors' repository"
)

STUDIES = {
    f"dp_scaffold_k{steps}": Study(
        title=f"DP-SCAFFOLD against DP-FedAvg, {steps} local updates",
        source=SOURCE,
        settings=SETTINGS,
        measure=partial(measure, steps=steps),
        seeds={"reduced": 3, "full": 3},
    )
    for steps in PUBLISHED
}
