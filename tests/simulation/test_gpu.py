"""`device: auto` trains on a GPU if there is one; the result equals the CPU's within rounding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedsim.runs.runner import run_experiment

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA device to compare with the CPU"
)
# Seeded noise has other numbers on a GPU than on a CPU, so it must be too small to be seen; one
# integer order of Rényi divergence is the only quick ε of so little noise.
PRIVATE = {
    **{"noise_multiplier": 1e-5, "delta": 1e-3, "max_grad_norm": 0.5},
    "accountant": {"name": "rdp", "orders": [2.0]},
}
NOISY = {**PRIVATE, "noise_multiplier": 1.0}


def experiment(privacy: Mapping[str, object] | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": "devices",
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": 6, "min_examples": 20},
        },
        "model": {"name": "mlp", "args": {"hidden": [40]}},
        "federation": {"rounds": 2},
        "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.3}},
    }
    return {**content, "privacy": privacy}


def outcome(
    folder: Path, privacy: Mapping[str, object] | None, **keys: object
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The model after two rounds, and what each client spent."""
    sections = {"device": "runtime", "vectorized_clients": "local"}
    overrides = {f"{sections[key]}.{key}": value for key, value in keys.items()}
    run = run_experiment(experiment(privacy), overrides=overrides, out=folder)
    assert all(row["failed"] == [] for row in run.rounds)
    spent = [] if run.privacy is None else [str(c.epsilon) for c in run.privacy.clients]
    return load_file(folder / "model.safetensors"), spent


@needs_cuda
@pytest.mark.parametrize("privacy", [PRIVATE, None], ids=["private", "plain"])
@pytest.mark.parametrize("vectorized_clients", [4, "off"], ids=["vectorized", "one by one"])
def test_the_gpu_gives_the_cpus_model_within_rounding(
    tmp_path: Path, vectorized_clients: int | str, privacy: Mapping[str, object] | None
) -> None:
    there, spent_there = outcome(
        tmp_path / "gpu", privacy, device="auto", vectorized_clients=vectorized_clients
    )
    here, spent_here = outcome(
        tmp_path / "cpu", privacy, device="cpu", vectorized_clients=vectorized_clients
    )
    assert spent_there == spent_here
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@needs_cuda
def test_a_clients_ledger_is_the_cpus_and_its_noise_is_not(tmp_path: Path) -> None:
    there, spent_there = outcome(tmp_path / "gpu", NOISY, device="cuda")
    here, spent_here = outcome(tmp_path / "cpu", NOISY, device="cpu")
    assert spent_there == spent_here
    assert any(not np.allclose(there[name], value, rtol=1e-3) for name, value in here.items())


@needs_cuda
def test_auto_is_the_gpu() -> None:
    from fedsim.federation.trained_model import choose_device

    assert choose_device("auto").type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    from fedsim.federation.trained_model import DeviceError, choose_device

    assert choose_device("auto").type == "cpu"
    with pytest.raises(DeviceError, match=r"no CUDA device; use auto or cpu"):
        choose_device("cuda")


def test_the_comparison_would_see_another_seed(tmp_path: Path) -> None:
    """The tolerance is far below what different noise does: the test above can fail."""
    first, _ = outcome(tmp_path / "first", NOISY, device="cpu")
    other = run_experiment(experiment(NOISY), overrides={"seed": 1}, out=tmp_path / "other").path
    values = load_file(other / "model.safetensors")
    assert any(
        not np.allclose(first[name], value, rtol=1e-3, atol=1e-4) for name, value in values.items()
    )


def test_noise_of_the_comparison_is_too_small_to_be_seen(tmp_path: Path) -> None:
    quiet, _ = outcome(tmp_path / "quiet", PRIVATE, device="cpu")
    silent = {**PRIVATE, "noise_multiplier": 1e-6}
    values, _ = outcome(tmp_path / "silent", silent, device="cpu")
    for name, value in values.items():
        np.testing.assert_allclose(quiet[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
