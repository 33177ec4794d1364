"""experiments/parameters.yaml: five parameters of DP-SGD, one at a time, at one ε."""

import csv
from pathlib import Path

import pytest

import fedsim
from fedsim.comparison.file.load import load_comparison

FILE = Path(__file__).parent.parent.parent / "experiments" / "parameters.yaml"
KEYS = ["batch_size", "lr", "max_grad_norm", "noise_multiplier", "hidden"]

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="runs the experiments of a checkout")


def test_each_parameter_varies_alone_around_the_reference() -> None:
    names = [one.name for one in load_comparison(FILE).variants]
    assert names[0] == "dp"
    assert {name.removeprefix("dp-").partition("=")[0] for name in names[1:]} == set(KEYS)
    assert len(names) == 1 + 3 + 5 + 4 + 4 + 4  # the reference values are the first variant


@pytest.mark.slow
def test_every_parameter_has_a_figure_and_every_run_stays_within_its_budget(
    tmp_path: Path,
) -> None:
    result = fedsim.compare(FILE, seeds=1, out=tmp_path)
    assert all(one.epsilon is not None and one.epsilon <= 4.0 for one in result.results.variants)
    means = {}
    for key in KEYS:
        rows = list(csv.DictReader((tmp_path / "figures" / f"against-{key}.csv").open()))
        assert len(rows) >= 4
        means |= {row["variant"]: float(row["mean"]) for row in rows}
    # A lot of three quarters of a client's data affords too few steps, and so does little noise.
    assert means["dp"] > means["dp-batch_size=112"] + 0.2
    assert means["dp"] > means["dp-noise_multiplier=1"]
    assert means["dp"] > means["dp-lr=0.125"]
