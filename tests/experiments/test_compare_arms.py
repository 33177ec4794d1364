"""experiments/compare_arms.yaml: what it compares, and the order that its page reports."""

from pathlib import Path

import pytest

from fedsim.comparison.compare import compare
from fedsim.comparison.file.load import load_comparison

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
FILE = EXPERIMENTS / "compare_arms.yaml"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="reads the experiments of a checkout")


def test_it_has_every_arm_at_two_targets() -> None:
    loaded = load_comparison(FILE)
    assert "#   fedsim compare experiments/compare_arms.yaml" in FILE.read_text()
    found = {
        (variant.arm, None if privacy is None else privacy.target_epsilon)
        for variant in loaded.variants
        for privacy in [variant.experiments[0].experiment.privacy]
    }
    arms = (None, "pooled", "local_only", "output_perturbation", "input_perturbation")
    assert found == {("plain", None)} | {(arm, target) for arm in arms for target in (8.0, 1.0)}


@pytest.mark.slow
def test_gradients_are_the_best_place_for_the_noise(tmp_path: Path) -> None:
    result = compare(FILE, seeds=2, out=tmp_path / "out", workers=2)
    mean = {
        one.name: sum(run.metrics["test_accuracy"] or 0.0 for run in one.outcomes) / 2
        for one in result.results.variants
    }
    assert mean["gradients-8"] > mean["models-8"] > mean["alone-8"]
    assert mean["gradients-1"] > mean["models-1"] + 0.1
    assert mean["gradients-1"] > mean["examples-1"] + 0.3
    assert mean["pooled-1"] > mean["gradients-1"] > mean["alone-1"]
