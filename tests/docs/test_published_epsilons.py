"""The page of published ε: its table and numbers are those of the training files, and the files are
those of the code that they describe, as far as it can be computed."""

import math
import re
from functools import cache
from pathlib import Path

import dp_accounting as dp
import numpy as np
import opacus.accountants.utils
import pytest
from dp_accounting.pld import PLDAccountant

from fedsim.accountant import EpochShuffled, Event, Gaussian, PoissonSampled, PrivacyLedger
from fedsim.core.formatting import epsilon_text
from fedsim.tools.totals.training import TrainingReport, read_training, report_of

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explain" / "published_epsilons.md"
FILES = sorted((ROOT / "experiments" / "published").glob("*.yaml"))
NAMES = [path.stem for path in FILES]
LARGEST_OF_ORACLE = 1000.0  # beyond, the grid of losses of dp-accounting does not fit into memory


@cache
def report(name: str) -> TrainingReport:
    path = ROOT / "experiments" / "published" / f"{name}.yaml"
    return report_of(path.name, read_training(path))


def rows_of_page() -> dict[str, list[str]]:
    rows = re.findall(r"^\| \[(\w+)\]\([^)]*\) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_ten_files_are_on_the_page() -> None:
    assert len(NAMES) == 10
    assert sorted(rows_of_page()) == NAMES
    holds = [report(name) for name in NAMES]
    assert sum(r.claimed is not None and r.spent <= r.claimed.epsilon for r in holds) == 5


@pytest.mark.parametrize("name", NAMES)
def test_the_table_and_the_section_have_the_numbers_of_the_file(name: str) -> None:
    found = report(name)
    assert found.claimed is not None
    pld = [epsilon_text(row.epsilons["pld"]) for row in found.rows]
    poisson = pld[1] if found.training.sampling == "shuffle" else ""
    claimed = f"{found.claimed.epsilon:g}"
    cells = [claimed, pld[0], poisson, pld[-1] if len(pld) > 1 else ""]
    assert rows_of_page()[name] == cells
    anchor = re.search(rf"\[{name}\]\(#([^)]+)\)", PAGE.read_text())
    assert anchor is not None
    number = numbers_by_anchor()[anchor[1]]
    rdp = [epsilon_text(row.epsilons["rdp"]) for row in found.rows]
    assert pld[0] in number
    assert number <= {*pld, *rdp, claimed, "3.4"}


def numbers_by_anchor() -> dict[str, set[str]]:
    """Return the decimal numbers of the last point of each section, by its anchor."""
    numbers = dict[str, set[str]]()
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        point = text.partition("- The number:")[2]
        point = re.sub(r"46\.3|\(.*?\)|`.*?`", "", point)
        numbers[anchor] = set(re.findall(r"\d+\.\d+(?:e\+\d+)?", point))
    return numbers


def dp_event(event: Event) -> dp.DpEvent:
    match event:
        case Gaussian(noise_multiplier):
            return dp.GaussianDpEvent(noise_multiplier)
        case PoissonSampled(sampling_rate, inside):
            return dp.PoissonSampledDpEvent(sampling_rate, dp_event(inside))
        case EpochShuffled(_, inside):  # one release about known batches
            return dp_event(inside)
        case _:
            raise AssertionError(event)


def dp_epsilon(ledger: PrivacyLedger, delta: float, *, interval: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=interval)
    for event, count in ledger.entries:
        accountant.compose(dp_event(event), count)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("name", NAMES)
def test_dp_accounting_has_the_numbers_of_the_table(name: str) -> None:
    found = report(name)
    for row in found.rows:
        ours = row.epsilons["pld"]
        if ours < LARGEST_OF_ORACLE:
            interval = max(1e-4, 1e-4 * ours)
            oracle = dp_epsilon(row.training.ledger(), row.training.delta, interval=interval)
            assert ours == pytest.approx(oracle, rel=1e-3)


def test_noise_of_flamby_is_that_of_the_calibration_of_opacus() -> None:
    noise = opacus.accountants.utils.get_noise_multiplier(
        target_epsilon=1.0, target_delta=1e-3, sample_rate=1 / 8, epochs=15, accountant="rdp"
    )
    assert report("flamby").training.noise_multiplier == noise


def test_rounds_of_one_client_are_those_of_the_seeds_of_dp_fedsam() -> None:
    rounds = np.zeros(500, dtype=int)
    for number in range(200):
        rounds[np.random.RandomState(number).choice(500, 50, replace=False)] += 1
    assert report("dp_fedsam").training.steps == rounds.max()


def test_sensitivity_is_that_of_the_trees_of_dp_ftrl() -> None:
    def squares(batches: int, epochs: int, virtual: int) -> int:
        """Return the largest sum of squares over nodes of how often a batch is below a node."""
        layer = [np.eye(batches, dtype=int)[step % batches] for step in range(batches * epochs)]
        layer += [np.zeros(batches, dtype=int)] * virtual
        total = np.zeros(batches, dtype=int)
        while layer:
            total += sum(node**2 for node in layer)
            pairs = zip(layer[::2], layer[1::2], strict=False)
            layer = [left + right for left, right in pairs]
        return int(total.max())

    total = 4 * squares(100, 20, 48) + squares(100, 20, 0)
    assert total == 4129
    assert report("dp_ftrl").training.sensitivity == pytest.approx(math.sqrt(total), rel=1e-7)
