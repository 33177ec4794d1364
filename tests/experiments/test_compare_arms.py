"""experiments/compare_arms.yaml: what it compares, and the order that its page reports."""

from pathlib import Path

import pytest

from fedsim.comparison.load import load_comparison
from fedsim.runs.runner import run_experiment

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
FILE = EXPERIMENTS / "compare_arms.yaml"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads the experiments of a checkout")


def test_it_has_every_arm_at_two_targets() -> None:
    loaded = load_comparison(FILE)
    assert "#   fedsim compare experiments/compare_arms.yaml" in FILE.read_text()
    found = {
        (variant.arm, None if privacy is None else privacy.target_epsilon)
        for variant in loaded.variants
        for privacy in [variant.experiment.privacy]
    }
    arms = (None, "pooled", "local_only", "output_perturbation", "input_perturbation")
    assert found == {("plain", None)} | {(arm, target) for arm in arms for target in (8.0, 1.0)}


@pytest.mark.slow
def test_gradients_are_the_best_place_for_the_noise(tmp_path: Path) -> None:
    """With ε = 1, where the differences are the largest, and the first seed."""
    found = {}
    for variant in load_comparison(FILE).variants:
        if variant.name.endswith("-1"):
            loaded = variant.loaded
            content = loaded.experiment.model_dump(mode="json")
            result = run_experiment(content, base=loaded.base, out=tmp_path / variant.name)
            found[variant.name] = result.metrics["test_accuracy"]
    assert found["gradients-1"] > found["models-1"] + 0.1
    assert found["gradients-1"] > found["examples-1"] + 0.3
    assert found["pooled-1"] > found["gradients-1"] > found["alone-1"]
