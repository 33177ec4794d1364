"""A data set of one example more or less has the same noise, scale, rate, divisor and steps.

Opacus 1.0 to 1.6 derives the divisor, the sampling rate and the number of steps from the length of
the data set. Where that number is private, one step in many dimensions tells neighbours apart by
the scale of the noise alone (meta-pytorch/opacus issues 571 and 819, arXiv:2605.15648). Here all
gradients are zero, so a release is its noise, divided: it must be equal bit for bit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedsim.clients import PrivacyEngine
from fedsim.runs.runner import RunResult, run_experiment

DECLARED = 24
DATA = """
import numpy as np

def load(seed=0, examples=0):
    test = np.zeros((4, 800), np.float32), np.arange(4) % 2
    return np.zeros((examples, 800), np.float32), np.arange(examples) % 2, *test
"""
ADD_REMOVE = {"adjacency": {"name": "add_remove", "declared_examples": DECLARED}}


def federation(folder: Path, examples: int, **privacy: Any) -> RunResult:
    """Two clients with half of the examples each; a linear model of inputs that are zero."""
    folder.mkdir()
    (folder / "zeros.py").write_text(DATA)
    experiment = {
        "name": "zeros",
        "data": {
            "dataset": "./zeros.py:load",
            "args": {"examples": examples},
            "partition": {"scheme": "iid", "num_clients": 2},
        },
        "model": {"name": "logistic", "args": {"bias": False}},
        "federation": {"rounds": 2, "clients_per_round": 2},
        "local": {"steps": 3, "batch_size": 8},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0, **privacy},
    }
    (folder / "e.json").write_text(json.dumps(experiment))
    return run_experiment(folder / "e.json", out=folder / "run")


def released(run: RunResult) -> tuple[Tensor, list[Any]]:
    """Return the final model, which is noise alone, and all that `privacy.json` says of clients."""
    tensors = load_file(run.path / "model.safetensors").values()
    values = torch.cat([value.flatten() for value in tensors])
    rows = json.loads((run.path / "privacy.json").read_text())["clients"]
    for row in rows:
        del row["ledger_head"]  # a hash over keyed digests of the examples
    return values, rows


@pytest.mark.parametrize("sampling", ["poisson", "balls_and_bins"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_federation_releases_the_same_of_neighbours(
    tmp_path: Path, sampling: str, clipping: str
) -> None:
    settings = {**ADD_REMOVE, "sampling": sampling, "clipping": clipping, "accountant": "rdp"}
    model, rows = released(federation(tmp_path / "n", 2 * DECLARED, **settings))
    assert model.std() > 0.01
    for name, examples in (("less", 2 * (DECLARED - 1)), ("more", 2 * (DECLARED + 1))):
        other, other_rows = released(federation(tmp_path / name, examples, **settings))
        assert other_rows == rows
        assert torch.equal(other, model)


def test_mutation_a_divisor_of_the_real_size_is_seen(tmp_path: Path) -> None:
    """Under zero-out the size is public and sets rate and divisor; the check sees such a run."""
    model, rows = released(federation(tmp_path / "n", 48, sampling="balls_and_bins"))
    other, other_rows = released(federation(tmp_path / "more", 66, sampling="balls_and_bins"))
    assert other_rows != rows
    assert not torch.equal(other, model)


def engine_releases(examples: int, *, steps: int | None = 5) -> tuple[list[Tensor], PrivacyEngine]:
    model = nn.Linear(50, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine(
        model,
        batch_size=8,
        sample_size=DECLARED,
        noise_multiplier=1.0,
        adjacency="add_remove",
        accountant="rdp",
        seed=3,
    )
    x, y = torch.zeros(examples, 50), torch.arange(examples) % 2
    seen = []
    with engine.attach(optimizer):
        for features, targets in engine.batches(x, y, steps=steps):
            optimizer.zero_grad()
            engine.backward(nn.functional.cross_entropy(model(features), targets, reduction="none"))
            optimizer.step()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.clone())
    return seen, engine


@pytest.mark.parametrize("steps", [None, 5])
def test_an_engine_releases_the_same_of_neighbours(steps: int | None) -> None:
    model, engine = engine_releases(DECLARED, steps=steps)
    assert len(model) == (steps or 3)  # a pass of 24 declared examples in batches of 8
    assert all(release.std() * 8 > 0.5 for release in model)
    for examples in (DECLARED - 1, DECLARED + 1):
        other, other_engine = engine_releases(examples, steps=steps)
        assert other_engine.terms == engine.terms
        assert other_engine.ledger == engine.ledger
        assert other_engine.get_epsilon() == engine.get_epsilon()
        assert len(other) == len(model)
        assert all(torch.equal(a, b) for a, b in zip(other, model, strict=True))


def test_a_private_loader_has_as_many_batches_for_neighbours() -> None:
    lengths = set()
    for examples in (DECLARED - 1, DECLARED, DECLARED + 1):
        _, engine = engine_releases(DECLARED, steps=0)
        data = TensorDataset(torch.zeros(examples, 50), torch.arange(examples) % 2)
        lengths.add(len(engine.private_loader(DataLoader(data, batch_size=8, shuffle=True))))
    assert lengths == {3}


def test_an_engine_made_from_a_loader_refuses_a_private_length() -> None:
    """`make_private` reads rate and divisor from the loader, as Opacus does."""
    model = nn.Linear(50, 2)
    data = TensorDataset(torch.zeros(24, 50), torch.arange(24) % 2)
    with pytest.raises(ValueError, match="keeps the number of examples private, but the loader's"):
        PrivacyEngine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            adjacency="add_remove",
        )
