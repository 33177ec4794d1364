from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedsim.data import Examples
from fedsim.data.builtin.scikit import load_digits
from fedsim.models.build import build_model, preflight
from fedsim.models.catalog import MODELS, ModelError
from fedsim.models.losses import cross_entropy, mse, resolve_loss
from fedsim.models.settings import ModelSettings
from fedsim.models.tasks import task_for

DIGITS = load_digits().train
TASK = task_for("cross_entropy", DIGITS.targets)


class Forward(nn.Module):
    """A model whose forward is a function."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x):
        return self.function(x)


def flat(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width))


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_pass_and_are_left_as_they_were(name):
    model = build_model(
        ModelSettings(name=name),
        input_shape=DIGITS.input_shape,
        num_outputs=TASK.num_outputs,
        seed=0,
        base=Path(),
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    preflight(model, resolve_loss("cross_entropy", Path()), TASK, DIGITS)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_one_example_is_enough():
    preflight(flat(10), cross_entropy, TASK, DIGITS.rows(np.array([3])))


def test_complex_buffers_cannot_be_averaged():
    model = flat(10)
    model.register_buffer("angles", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match="'angles' has type complex64, which cannot be averaged"):
        preflight(model, cross_entropy, TASK, DIGITS)


def test_an_embedding_of_numbers_is_told_about_tokens():
    with pytest.raises(ModelError, match=r"data\.features: tokens"):
        preflight(nn.Embedding(20, 10), cross_entropy, TASK, DIGITS)


def test_batch_norm_keeps_its_statistics():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))
    preflight(model, cross_entropy, TASK, DIGITS)
    assert model.state_dict()["0.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (
            nn.Linear(10, 10),
            cross_entropy,
            r"\(3, 1, 8, 8\) with RuntimeError: mat1 .* \(1, 8, 8\)",
        ),
        (flat(1), cross_entropy, r"shape \(batch, 10\), .* got shape \(3, 1\); change the size"),
        (flat(9), cross_entropy, "one score for each of 10 classes"),
        (flat(10), F.cross_entropy, "reduction='none'"),
        (Forward(lambda x: (x, x)), cross_entropy, "must return a tensor, got tuple"),
        (Forward(lambda x: x.sum()), cross_entropy, r"got shape \(\) for a batch of 3"),
        (Forward(lambda x: x.flatten()), cross_entropy, "one row per example, got shape"),
        (Forward(lambda x: x.flatten(1).squeeze()), cross_entropy, r"\(64,\) for a batch of 1"),
        (Forward(lambda x: x.flatten(1).int()), cross_entropy, "must be real numbers, got"),
        (Forward(lambda x: x.flatten(1) / 0), cross_entropy, "outputs are not finite"),
    ],
)
def test_what_does_not_fit_is_refused_on_one_line(model, loss, message):
    with pytest.raises(ModelError, match=message) as caught:
        preflight(model, loss, TASK, DIGITS)
    assert "\n" not in str(caught.value)
    assert model.training


def test_targets_out_of_range_are_refused():
    task = task_for("cross_entropy", np.arange(5))
    with pytest.raises(ModelError, match="got targets from 0 to 9; number them"):
        preflight(flat(5), cross_entropy, task, DIGITS)


def test_regression_needs_one_output_per_target():
    data = Examples(DIGITS.features, DIGITS.targets.astype(np.float32))
    task = task_for("mse", data.targets)
    preflight(flat(1), mse, task, data)
    preflight(Forward(lambda x: x.flatten(1).sum(1)), mse, task, data)
    with pytest.raises(ModelError, match=r"shape \(batch, 1\), one per target, got shape \(3, 2\)"):
        preflight(flat(2), mse, task, data)


def test_a_line_of_the_users_model_is_named(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)\n"
    )
    settings = ModelSettings(name="./net.py:Net", args={"in_features": 3, "out_features": 10})
    model = build_model(settings, input_shape=(), num_outputs=0, seed=0, base=tmp_path)
    with pytest.raises(ModelError, match=r"RuntimeError: .* \(net.py, line 4\); build it for"):
        preflight(model, cross_entropy, TASK, DIGITS)


def test_parameters_of_another_type_than_the_features_are_named():
    with pytest.raises(ModelError, match=r"keep its parameters in float32, .*they are float64"):
        preflight(flat(10).double(), cross_entropy, TASK, DIGITS)
