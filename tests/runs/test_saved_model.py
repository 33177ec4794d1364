"""The model of a run is built again from its directory and takes raw inputs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.errors import InputError
from fedsim.data.builtin.scikit import load_digits
from fedsim.models.features.transforms import FeatureModel
from fedsim.runs.runner import run_experiment

EXPERIMENT = {
    "name": "saved",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {
        "name": "logistic",
        "args": {"init": "zeros"},
        "features": ["hog", "unit_norm"],
    },
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 8}},
    "privacy": {"target_epsilon": 8, "delta": 1e-3, "max_grad_norm": 0.3},
}
NET = """
from torch import nn
def build(width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(288, width), nn.Tanh(), nn.Linear(width, 10))
"""


@pytest.mark.parametrize(
    "name", ["logistic", pytest.param("./net.py:build", marks=pytest.mark.slow)]
)
def test_a_saved_model_takes_inputs_as_the_dataset_has_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    args = {"args": {}} if ":" in name else {}
    source = {**EXPERIMENT, "model": {**EXPERIMENT["model"], "name": name, **args}}
    result = run_experiment(source, out=tmp_path / "run", base=tmp_path)
    model = result.model()
    assert isinstance(model, FeatureModel)
    digits = load_digits().train
    test = np.sort(np.random.default_rng(0).permutation(len(digits))[:50])
    outputs = model(torch.from_numpy(digits.features[test]))
    assert outputs.shape == (50, 10)
    again = fedsim.load_model(tmp_path / "run", base=tmp_path)
    assert torch.equal(again(torch.from_numpy(digits.features[test])), outputs)
    if ":" in name:
        with pytest.raises(InputError, match=r"no such file: .*base \(--base\)"):
            fedsim.load_model(tmp_path / "run")


def test_the_saved_model_has_the_accuracy_of_the_last_round(tmp_path: Path) -> None:
    """A test set of the dataset's own: the plug-in returns it, so that the test can read it too."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def load(seed=0):\n"
        "    x = np.random.default_rng(7).normal(size=(300, 6)).astype(np.float32)\n"
        "    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)\n"
        "    return x[:200], y[:200], x[200:], y[200:]\n"
    )
    source = {
        **EXPERIMENT,
        "data": {
            "dataset": "./mine.py:load",
            "partition": {"scheme": "iid", "num_clients": 2},
        },
        "model": {
            "name": "logistic",
            "features": [{"standardize": {"std": 2}}, {"random_fourier": {"gamma": 0.5}}],
        },
        "privacy": None,
    }
    result = run_experiment(source, out=tmp_path / "run", base=tmp_path)
    x = np.random.default_rng(7).normal(size=(300, 6)).astype(np.float32)[200:]
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    predicted = result.model()(torch.from_numpy(x)).argmax(dim=1).numpy()
    assert (predicted == y).mean() == pytest.approx(result.metrics["test_accuracy"])


def test_a_run_with_a_missing_or_another_model_says_what_is_wrong(tmp_path: Path) -> None:
    run_experiment({**EXPERIMENT, "privacy": None}, out=tmp_path / "run")
    file = tmp_path / "run" / "experiment.yaml"
    file.write_text(file.read_text().replace("bias: true", "bias: false"))
    with pytest.raises(InputError, match="the weights do not fit the model"):
        fedsim.load_model(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no model\.safetensors: finish the run"):
        fedsim.load_model(tmp_path / "run")
