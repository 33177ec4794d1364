"""experiments/parameters.yaml: five parameters of DP-SGD, one at a time, at one ε."""

from pathlib import Path

import pytest

from fedsim.comparison.load import load_comparison
from fedsim.runs.runner import run_experiment

FILE = Path(__file__).parent.parent.parent / "experiments" / "parameters.yaml"
KEYS = ["batch_size", "lr", "max_grad_norm", "noise_multiplier", "hidden"]

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="runs the experiments of a checkout")


def test_each_parameter_varies_alone_around_the_reference() -> None:
    names = [one.name for one in load_comparison(FILE).variants]
    assert names[0] == "dp"
    assert {name.removeprefix("dp-").partition("=")[0] for name in names[1:]} == set(KEYS)
    assert len(names) == 1 + 3 + 5 + 4 + 4 + 4  # the reference values are the first variant


@pytest.mark.slow
def test_extreme_values_are_worse_and_stay_within_the_budget(tmp_path: Path) -> None:
    found = {}
    for one in load_comparison(FILE).variants:
        if one.name in ("dp", "dp-batch_size=112", "dp-noise_multiplier=1"):
            loaded = one.loaded
            content = loaded.experiment.model_dump(mode="json")
            result = run_experiment(content, base=loaded.base, out=tmp_path / one.name)
            assert result.privacy is not None
            assert result.privacy.system_epsilon <= 4.0
            found[one.name] = result.metrics["test_accuracy"]
    # A batch of three quarters of a client's data affords too few steps, and so does little noise.
    assert found["dp"] > found["dp-batch_size=112"] + 0.2
    assert found["dp"] > found["dp-noise_multiplier=1"]
