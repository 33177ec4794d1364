"""Batches larger than memory are split, and nothing changes but the rounding of sums."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.runner import run_experiment

# A model that notes the largest batch that it was trained on.
MODEL = """
from pathlib import Path
from torch import nn

class Watched(nn.Sequential):
    largest = 0

    def forward(self, x):
        if self.training:
            Watched.largest = max(Watched.largest, len(x))
            Path(LOG).write_text(str(Watched.largest))
        return super().forward(x)

def build(hidden=41):
    return Watched(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))
"""
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, "clipping": "adaptive"}


def trained(
    tmp_path: Path,
    name: str,
    privacy: object,
    most: int | None,
    vectorized_clients: object = "off",
    batch_size: int = 24,
) -> tuple[Path, int]:
    """Return the run directory, and the most examples that were in one forward pass."""
    log = tmp_path / f"{name}.log"
    (tmp_path / f"{name}.py").write_text(MODEL.replace("LOG", repr(str(log))))
    experiment: dict[str, Any] = {
        "name": "parts",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": f"./{name}.py:build"},
        "federation": {"rounds": 1},
        "local": {
            "steps": 2,
            "batch_size": batch_size,
            "max_physical_batch": most,
            "vectorized_clients": vectorized_clients,
        },
        "privacy": privacy,
    }
    run_experiment(experiment, base=tmp_path, out=tmp_path / name)
    return tmp_path / name, int(log.read_text())


@pytest.mark.parametrize("privacy", [PRIVACY, None], ids=["private", "plain"])
def test_parts_of_a_batch_are_one_batch(tmp_path: Path, privacy: object) -> None:
    """One noise draw: a second one would move every value by much more than rounding does."""
    whole, largest = trained(tmp_path, "whole", privacy, None)
    assert largest > 20
    # Padded batches have a multiple of 8 rows, or one; then the 4 examples that try the model are
    # most. One row with noise: tests/clients/training/test_block.py.
    for most, rows in ((20, 16),) if privacy else ((20, 16), (7, 4)):
        parts, largest = trained(tmp_path, f"parts_{most}", privacy, most)
        assert largest == rows
        assert (parts / "ledger.jsonl").read_text().count("\n") == (3 if privacy else 0)
        one, other = (load_file(run / "model.safetensors") for run in (whole, parts))
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-5)
        steps = [
            [line.split(",")[3:10] for line in (run / "clients.csv").read_text().splitlines()]
            for run in (whole, parts)
        ]
        assert steps[0] == steps[1], "ε, noise, rounds and steps"


@pytest.mark.parametrize("privacy", [PRIVACY, None], ids=["private", "plain"])
def test_the_limit_holds_for_clients_that_train_together(tmp_path: Path, privacy: object) -> None:
    """A block has as many clients as fit: two with 64 or 72 rows each, and not three."""
    whole, _ = trained(tmp_path, "whole", privacy, None, batch_size=60)
    block, largest = trained(tmp_path, "block", privacy, 180, "auto", batch_size=60)
    assert largest in (2 * 64, 2 * 72, 2 * 80)
    one, other = (load_file(run / "model.safetensors") for run in (whole, block))
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-5)


def test_a_batch_that_fits_is_not_touched(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path, "whole", PRIVACY, None)
    large, _ = trained(tmp_path, "large", PRIVACY, 10_000)
    assert (whole / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()


def test_a_run_is_not_continued_with_other_parts(tmp_path: Path) -> None:
    """Charged but unfinished rounds are repeated with the same noise: the bits must be the same."""
    experiment: dict[str, Any] = {
        "name": "parts",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 1},
        "local": {"steps": 1, "batch_size": 32},
        "privacy": PRIVACY,
    }
    run_experiment(experiment, out=tmp_path / "r")
    changed = {"local.max_physical_batch": 8}
    with pytest.raises(RunDirectoryError, match=r"local\.max_physical_batch was None"):
        run_experiment(experiment, overrides=changed, out=tmp_path / "r", resume=True)
