"""What tests of whole runs compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file


def charges(run: Path) -> list[tuple[Any, ...]]:
    """The charges of a run by client and round: steps and events, without hashes of the model."""
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    keys = ("client", "round", "steps", "ledger")
    return sorted(
        (tuple(json.loads(line)[key] for key in keys) for line in lines),
        key=lambda found: found[:2],
    )


def _assert_close_runs(one: Path, other: Path) -> None:
    assert charges(one) == charges(other)
    models = [load_file(run / "model.safetensors") for run in (one, other)]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        np.testing.assert_allclose(models[1][name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.fixture(scope="session")
def charges_of() -> Callable[[Path], list[tuple[Any, ...]]]:
    """Return the charges of a run by client and round, without hashes of the model."""
    return charges


@pytest.fixture(scope="session")
def assert_close_runs() -> Callable[[Path, Path], None]:
    """Check that two runs have the same charges, and models that differ by rounding at most.

    Other noise or another batch would move values by far more.
    """
    return _assert_close_runs
