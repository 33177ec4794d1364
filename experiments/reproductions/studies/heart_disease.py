"""Silo-level DP on FLamby's Heart-Disease (du Terrail et al. 2022), with the user's files."""

from experiments.reproductions.rows import Row, Unit, number_row
from experiments.reproductions.runs import run_variants
from experiments.reproductions.study import NeededFile, Setup, Study
from fedsim.comparison.statistics import t_interval

PUBLISHED = {"plain": 0.7125, "eps-10": 0.698, "eps-5": 0.700, "eps-1": 0.7015}
DEVIATION = {"plain": 0.024, "eps-10": 0.043, "eps-5": 0.041, "eps-1": 0.044}  # over five seeds
CENTRES = ("cleveland", "hungarian", "switzerland", "va")
ORIGIN = "UCI Machine Learning Repository, Heart Disease; its license is to be read first"
SETTINGS = (
    "As published: four centres, a logistic regression, clipping at 1.1, Adam with learning rate "
    "0.001, batches of 4, 15 rounds of 100 local updates, δ = 1e-3, the split of FLamby, five "
    "seeds. Not as published: Poisson batches; Adam's state begins anew in each round; accuracy "
    "is over all test patients together. The tolerance is the published deviation over seeds."
)


def measure(setup: Setup) -> list[Row]:
    """Return the accuracy without privacy and at each ε."""
    path = str((setup.data / "heart").absolute())
    changes = {"data.args.path": path, "data.partition.args.path": path}
    runs = run_variants("heart_compare.yaml", setup, changes=changes)
    return [
        number_row(
            f"test accuracy, {'no privacy' if name == 'plain' else 'ε = ' + name[4:]}",
            published,
            t_interval(runs[name].metric("test_accuracy")),
            tolerance=DEVIATION[name],
            unit=Unit(scale=100, digits=1, suffix=" %"),
        )
        for name, published in PUBLISHED.items()
    ]


STUDIES = {
    "heart_disease": Study(
        title="Heart-Disease: what silo-level DP costs",
        source="du Terrail et al. 2022, FLamby, arXiv:2210.04620, its experiment with DP",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 2, "full": 5},
        files=tuple(
            NeededFile(path=f"heart/processed.{name}.data", origin=ORIGIN) for name in CENTRES
        ),
    )
}
