"""Silo-level DP on FLamby's Heart-Disease (du Terrail et al. 2022), with the built-in dataset.

Read at commit edacf54 of github.com/owkin/FLamby. Published accuracies are those of
flamby/dp_example/results_fed_heart_disease.csv at δ = 1e-3, means over five seeds.

FLamby's ε are too small. `make_private_with_epsilon` gets the number of rounds as the number of
epochs (flamby/strategies/utils.py:158-167), so the noise is that of 15 epochs, 120 to 750 steps. A
hospital then takes 15 rounds of 100 steps (create_fed_heart_disease_dp_results.py:28-41). The study
says what these 1,500 steps spend, by the PLD accountant at Opacus' sampling rate. That counts
batches as Poisson samples. FLamby trains on batches of shuffled epochs (strategies/fed_avg.py:88-90
wraps the loader that Opacus did not replace), for which this ε is no theorem.
"""

from experiments.reproductions.rows import Row, Unit, context_row, number_row
from experiments.reproductions.runs import VariantRuns, run_variants
from experiments.reproductions.study import Setup, Study
from fedsim.comparison.statistics import t_interval

PUBLISHED = {"plain": 0.7125, "eps-10": 0.6981, "eps-5": 0.6997, "eps-1": 0.7015}
DEVIATION = {"plain": 0.024, "eps-10": 0.043, "eps-5": 0.041, "eps-1": 0.044}  # over five seeds
SETTINGS = (
    "As published, by the lines of FLamby at edacf54: four hospitals, complete rows, 13 features "
    "that each hospital normalises by its own training patients, which no ε covers, and two "
    "thirds for training by one fixed split (fed_heart_disease/dataset.py:90, 111-119, 128, "
    "140-167); a logistic regression from a random start; SGD with learning rate 0.001, batches "
    "of 4, clipping at 1.1, δ = 1e-3, 15 rounds of 100 steps "
    "(dp_example/create_fed_heart_disease_dp_results.py:27-44, 93); weights by size "
    "(strategies/fed_avg.py:177-186); the mean of the four hospitals' accuracies "
    "(create_fed_heart_disease_dp_results.py:97-99). The noise is that of Opacus' RDP accountant, "
    "which was the default when the results were committed, in October 2022 (pytorch/opacus "
    "c89a3bfd changed it in November). Not as published: Poisson batches; a learning rate of "
    "0.0012 under noise, because Opacus divides sums by its expected batch rounded down, 3 in "
    "three hospitals, where fedsim divides by 3.75 to 3.98; this is 0.001 times the mean of the "
    "quotients by size. The tolerance is the published deviation over seeds."
)


def measure(setup: Setup) -> list[Row]:
    """Return the accuracy without privacy and at each ε, and what was spent.

    Args:
        setup: size, seeds and directories.
    """
    runs = run_variants("heart_compare.yaml", setup)
    accuracies = [
        number_row(
            f"mean of four accuracies, {_label(name)}",
            published,
            t_interval(runs[name].metric("test_mean_accuracy")),
            tolerance=DEVIATION[name],
            unit=Unit(scale=100, digits=1, suffix=" %"),
        )
        for name, published in PUBLISHED.items()
    ]
    spent = [
        context_row(f"ε of a hospital with {_label(name)}", _spent(runs[name]))
        for name in PUBLISHED
        if name != "plain"
    ]
    return [*accuracies, *spent]


def _label(name: str) -> str:
    return "no privacy" if name == "plain" else f"FLamby's ε = {name.removeprefix('eps-')}"


def _spent(runs: VariantRuns) -> str:
    """Return the smallest and the largest ε of a hospital; it is the same in every run."""
    epsilons = [client["epsilon"] for client in runs.outcomes[0].clients]
    return f"{min(epsilons):.2f} to {max(epsilons):.2f}"


STUDIES = {
    "heart_disease": Study(
        title="Heart-Disease: what silo-level DP costs",
        source="du Terrail et al. 2022, FLamby, arXiv:2210.04620, its experiment with DP",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 2, "full": 20},
    )
}
