"""School at ε = 6 (Liu et al. 2022), with the user's file.

Read at commit f16ff76 of github.com/kenziyuliu/private-cross-silo-fl; files and lines in `SETTINGS`
are of that commit.
"""

from pathlib import Path

import numpy as np

from experiments.reproductions.files import school
from experiments.reproductions.rows import Row, Unit, number_row, order_row
from experiments.reproductions.runs import run_variants
from experiments.reproductions.study import NeededFile, Setup, Study
from fedsim.comparison.statistics import t_interval
from fedsim.runs.records import RunCheckpoint

PUBLISHED = {"fedavg": 0.02564, "local": 0.02628, "mr-mtl": 0.02394}  # README.md:47-49
NAMES = {"fedavg": "FedAvg", "local": "each school alone", "mr-mtl": "MR-MTL, λ = 1"}
TOLERANCE = 0.0005  # two test sets of 3,000 pupils differ by that much
SETTINGS = (
    "As published: 139 schools, a linear model from zero (model_utils.py:34), ε = 6 "
    "(README.md:47), δ = 1e-3 and clipping at 1 (runners/school/dp/main.sh), batches of 32, one "
    "epoch in each of 201 rounds (trainers/fedavg.py:63 has one more than `-t 200`), learning "
    "rate 0.01, half the squared error (jax_utils.py:45; here the whole, so half the learning "
    "rate and twice the bound), noise by Rényi DP for ⌊n/32⌋ steps an epoch "
    "(dp_accounting.py:110-111), weights by size, features standardised in each school and a "
    "fifth of its pupils for the test (utils.py:175-212), the same pupils as theirs in each of "
    "five seeds. Not as published: batches are drawn as they are charged, by Poisson sampling, "
    "so all pupils are used, where the authors shuffle and leave out the last batch "
    "(utils.py:36-43); the mean of MR-MTL is not weighted (mrmtl.py:97), and its pull is added "
    "after clipping, not before (mrmtl.py:43-60)."
)


def own_error(run: Path, path: str, seed: int) -> float:
    """Return the mean squared error of each school's own model on its own test pupils.

    Args:
        run: directory of a run whose clients keep models.
        path: `school.mat`.
        seed: of the run.
    """
    rows = RunCheckpoint.read(run / "checkpoint" / "model.safetensors").state.client_memory
    values = {name.rsplit(".")[-1]: one.astype(np.float64) for name, one in rows.items()}
    _, _, x, y = school.load(path, seed=seed)
    silos = school.silos(x, y, path, seed=seed, part="test")
    weight, bias = values["weight"][silos, 0], values["bias"][silos, 0]
    return float((((x * weight).sum(1) + bias - y) ** 2).mean())


def measure(setup: Setup) -> list[Row]:
    """Return the test errors of the methods, and their order."""
    path = str((setup.data / "school" / "school.mat").absolute())
    rates = school.sampling_rates(path)
    changes = {
        "data.args.path": path,
        "data.partition.args.path": path,
        "privacy.clients": {str(k): {"sampling_rate": rate} for k, rate in enumerate(rates)},
    }
    runs = run_variants("school_compare.yaml", setup, changes=changes)
    errors = {"fedavg": runs["fedavg"].metric("test_mse")}
    for name in ("local", "mr-mtl"):
        pairs = zip(runs[name].paths, setup.seeds, strict=True)
        errors[name] = [own_error(run, path, seed) for run, seed in pairs]
    unit = Unit(digits=5)
    rows = [
        number_row(
            f"test MSE, {NAMES[name]}",
            published,
            t_interval(errors[name]),
            tolerance=TOLERANCE,
            unit=unit,
        )
        for name, published in PUBLISHED.items()
    ]
    for name in ("fedavg", "local"):
        what = f"test MSE, MR-MTL minus {NAMES[name]}"
        size = unit.text(PUBLISHED["mr-mtl"] - PUBLISHED[name], signed=True)
        claim = f"smaller, {size}"
        rows.append(order_row(what, claim, errors["mr-mtl"], errors[name], larger=False, unit=unit))
    return rows


STUDIES = {
    "school": Study(
        title="School: 139 silos at ε = 6",
        source="Liu et al. 2022, arXiv:2206.07902, figure 3(c)",
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
