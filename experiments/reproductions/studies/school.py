"""School at ε = 6 (Liu et al. 2022), with the user's file."""

from experiments.reproductions.rows import Row, Unit, context_row, number_row
from experiments.reproductions.runs import run_variants
from experiments.reproductions.study import NeededFile, Setup, Study
from fedsim.comparison.statistics import t_interval

FEDAVG = 0.02564
TOLERANCE = 0.0005  # two test sets of 3,000 pupils differ by that much
SETTINGS = (
    "As published: 139 schools, a linear model from zero, ε = 6, δ = 1e-3, clipping at 1, lots of "
    "32, one epoch in each of 200 rounds, learning rate 0.01, noise by Rényi DP, weights by size, "
    "features standardised in each school, a fifth of its pupils for the test, five seeds. Not as "
    "published: lots are drawn as they are charged, by Poisson sampling, and not by shuffling; "
    "other divisions into training and test pupils."
)


def measure(setup: Setup) -> list[Row]:
    """Return the test error of FedAvg."""
    path = str((setup.data / "school" / "school.mat").absolute())
    changes = {"data.args.path": path, "data.partition.args.path": path}
    runs = run_variants("school_compare.yaml", setup, changes=changes)
    unit = Unit(digits=5)
    errors = {name: t_interval(one.metric("test_mse")) for name, one in runs.items()}
    return [
        number_row("test MSE of FedAvg", FEDAVG, errors["fedavg"], tolerance=TOLERANCE, unit=unit),
        context_row("test MSE of FedAvg without privacy", unit.interval(errors["plain"])),
    ]


STUDIES = {
    "school": Study(
        title="School: 139 silos at ε = 6",
        source="Liu et al. 2022, arXiv:2206.07902, figure 3(c), numbers of the authors' README",
        settings=SETTINGS,
        measure=measure,
        seeds={"reduced": 1, "full": 5},
        files=(
            NeededFile(
                path="school/school.mat",
                origin="data/school/ of github.com/kenziyuliu/private-cross-silo-fl",
            ),
        ),
    )
}
