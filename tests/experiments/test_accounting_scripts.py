"""The accounting scripts run offline, in seconds, and the page about them names them all."""

import io
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from runpy import run_path

import dp_accounting
import pytest
from dp_accounting import GaussianDpEvent as Gaussian
from dp_accounting import pld, rdp

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "experiments" / "accounting"
PAGE = ROOT / "docs" / "explain" / "privacy_accounting.md"
PLOTS = {
    "moments_vs_strong": ["moments_vs_strong"],
    "epsilon_against_settings": [f"epsilon_against_{name}" for name in "qzT"],
    "subsampled_bounds": ["subsampled_bounds"],
    "all_accountants": ["all_accountants"],
}
pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="runs the scripts of a checkout")

Table = dict[str, list[float]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The standard output of each script, run in an empty directory of its own."""
    found = {}
    for name, plots in PLOTS.items():
        directory, script = tmp_path_factory.mktemp(name), str(SCRIPTS / f"{name}.py")
        out, errors = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.chdir(directory)
            patch.syspath_prepend(SCRIPTS)
            patch.setattr(sys, "argv", [script])
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("error", RuntimeWarning)
            with redirect_stdout(out), redirect_stderr(errors):
                run_path(script, run_name="__main__")
        assert not errors.getvalue()
        made = {path.name for path in directory.iterdir()}
        assert made == {f"{plot}.png" for plot in plots}
        assert all((directory / plot).stat().st_size > 5000 for plot in made)
        found[name] = out.getvalue()
    return found


def tables(text: str) -> list[Table]:
    """Every table in the text: a header line and the lines of numbers below it."""
    result: list[Table] = []
    header: list[str] = []
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        try:
            row = [float(cell) for cell in cells]
        except ValueError:
            header = cells
            continue
        if header:
            result.append({name: [] for name in header})
            header = []
        for name, value in zip(result[-1], row, strict=True):
            result[-1][name].append(value)
    return result


def test_moments_beat_strong_composition_more_and_more(outputs: dict[str, str]) -> None:
    (table,) = tables(outputs["moments_vs_strong"])
    assert table["epochs"][6] == 100
    assert table["moments"][6] == pytest.approx(1.26, abs=5e-3)  # Abadi et al. 2016
    assert table["ratio"] == sorted(table["ratio"])
    assert table["ratio"][0] > 2


def test_epsilon_moves_the_right_way_and_pld_is_tighter(outputs: dict[str, str]) -> None:
    by = dict(zip("qzT", tables(outputs["epsilon_against_settings"]), strict=True))
    for name, table in by.items():
        assert all(p <= r for p, r in zip(table["PLD"], table["RDP"], strict=True))
        assert table["PLD"] == sorted(table["PLD"], reverse=name == "z")
    pairs = [pair for t in by.values() for pair in zip(t["RDP"], t["PLD"], strict=True)]
    assert all(1.07 < r / p < 1.18 for r, p in pairs if p > 2.0)  # as the page says
    assert max(r / p for r, p in pairs) > 3.0
    assert by["T"]["PLD"][-1] == pytest.approx(6.19, abs=5e-3)


def test_the_bounds_are_in_order(outputs: dict[str, str]) -> None:
    curves, totals = tables(outputs["subsampled_bounds"])
    names = ["good CLT", "lower", "dominating", "tightened", "published"]
    for name, next_name in pairwise(names):
        assert all(a <= b for a, b in zip(curves[name], curves[next_name], strict=True))
    assert curves["bad"] == curves["lower"]
    assert totals["lower"] < totals["dominating"] < totals["tightened"] < totals["published"]


def test_the_accountants_are_in_order(outputs: dict[str, str]) -> None:
    (table,) = tables(outputs["all_accountants"])
    for tighter, looser in [
        ("PLD", "RDP"),
        ("RDP", "moments"),
        ("optimal", "KOV"),
        ("KOV", "basic"),
        ("KOV", "strong"),
        ("PLD", "optimal"),
    ]:
        pairs = zip(table[tighter], table[looser], strict=True)
        assert all(a <= b * 1.0005 for a, b in pairs), (tighter, looser)
    assert table["moments"][-1] == pytest.approx(7.47, abs=5e-3)


def test_the_command_of_the_page_puts_the_plot_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "moments_vs_strong.py"), "--out", "a/b"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a" / "b" / "moments_vs_strong.png").exists()


def test_the_defects_that_the_page_lists_are_still_there() -> None:
    """One that is gone from a new version should go from the page; more are in tests/accountant."""

    def hidden(first: float) -> float:
        inner = dp_accounting.ComposedDpEvent([Gaussian(first), Gaussian(2.0)])
        accountant = rdp.RdpAccountant(orders=list(range(2, 65)))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, inner), 10)
        return accountant.get_epsilon(1e-5)

    assert (hidden(1), hidden(1.0)) == pytest.approx((3.55, 4.33), abs=6e-3)
    replace = dp_accounting.NeighboringRelation.REPLACE_ONE
    by_pld = pld.PLDAccountant(replace).compose(Gaussian(1.0)).get_epsilon(1e-5)
    by_rdp = rdp.RdpAccountant(neighboring_relation=replace).compose(Gaussian(1.0))
    assert (by_pld, by_rdp.get_epsilon(1e-5)) == pytest.approx((10.0, 4.73), abs=6e-3)
    opacus = pytest.importorskip("opacus.accountants")
    accountant = opacus.RDPAccountant()
    accountant.step(noise_multiplier=100.0, sample_rate=1e-5)
    assert accountant.get_epsilon(0.5) == pytest.approx(-0.69, abs=5e-3)


def test_the_page_names_every_script() -> None:
    text = PAGE.read_text()
    for name in PLOTS:
        assert f"python experiments/accounting/{name}.py" in text
