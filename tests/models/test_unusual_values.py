"""Models with scalars, empty parameters, and values of types that no upload has."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.models.build import build_model
from fedsim.models.catalog import ModelError
from fedsim.models.settings import ModelSettings
from fedsim.runs.runner import run_experiment

MODELS = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.scale * self.layer(x)

def half():
    return nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3))

class State(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def get_extra_state(self):
        return {}
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"rounds": 2, "strategy": "scaffold"}},
        {"secure_aggregation": {"protocol": "additive", "aggregators": 2}},
    ],
)
def test_a_parameter_may_be_a_number_or_empty(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    raw = {
        "name": "scaled",
        "data": {"dataset": "iris", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "./m.py:Scaled"},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0},
    }
    result = run_experiment(raw | changes, out=tmp_path / "run", base=tmp_path)
    assert result.model().state_dict()["scale"] != 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", "'0.weight' has type bfloat16, which cannot be averaged or saved"),
        ("State", "'_extra_state' has type dict, which cannot be averaged or saved"),
    ],
)
def test_values_that_cannot_be_saved_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODELS)
    settings = ModelSettings(name=f"./m.py:{name}", train=["1.*"])
    with pytest.raises(ModelError, match=message):
        build_model(settings, input_shape=(4,), num_outputs=3, seed=0, base=tmp_path)
