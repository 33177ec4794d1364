"""Tests of the model and of the experiment. Run them with `python -m pytest test_model.py`."""

from pathlib import Path

import torch
from model import build

import fedsim
from fedsim.testing import check_model

HERE = Path(__file__).parent


def test_the_model_keeps_the_contract() -> None:
    """Check the model as a run does before training; a failure's message has the fix."""
    torch.manual_seed(0)
    examples = torch.randn(20, 1, 8, 8)  # a few made-up examples in the shape of yours
    classes = torch.arange(20) % 10  # each class at least once
    check_model(build, examples, classes, loss="cross_entropy")


def test_the_experiment_runs(tmp_path: Path) -> None:
    """Run two rounds, which are enough to show that data, model and settings fit."""
    result = fedsim.run(
        HERE / "experiment.yaml", overrides={"federation.rounds": 2}, out=tmp_path / "run"
    )
    assert result.status == "completed"
    assert result.privacy is not None
    assert result.privacy.system_epsilon <= 8.0
