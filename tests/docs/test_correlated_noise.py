"""Every number of the pages on correlated noise is computed here."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.clients.correlated_noise import NoiseCorrelation, inverse_coefficients
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.noise.correlated.strategies import BandedStrategy
from fedsim.tools.advice.noise import predict_noise_error

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "howto" / "correlated_noise.md"
PROOFS = ROOT / "docs" / "explain" / "proofs.md"
RowsOf = Callable[[Path, str], list[list[str]]]
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")
CASE = {"examples": 2500, "batch_size": 50, "steps": 250, "target_epsilon": 8.0}
QUICKSTART = {"examples": 144, "batch_size": 28, "steps": 300, "target_epsilon": 1.0}


@pytest.mark.parametrize(("delta", "column"), [(1e-3, 2), (1e-5, 4)])
def test_the_error_is_at_most_seven_tenths_of_that_of_poisson_batches(
    delta: float, column: int, rows_of: RowsOf
) -> None:
    """Of 2,500 examples, batches of 50, 250 steps, ε = 8; each candidate with its own noise."""
    white = predict_noise_error(**CASE, delta=delta)
    rows = rows_of(PAGE, "sampling")[1:]
    assert rows[0][:2] == ["poisson", "1"]
    for name, bands, *cells in rows:
        sampling: Any = name
        found = predict_noise_error(**CASE, delta=delta, sampling=sampling, bands=int(bands))
        assert cells[column - 2] == f"{found:.3f}"
        assert cells[column - 1] == f"{found / white:.3f}"
        assert sampling == "poisson" or found <= 0.7 * white


def test_it_loses_at_many_passes_and_small_epsilon() -> None:
    white = predict_noise_error(**QUICKSTART, delta=1e-3)
    for bands in (2, 5):
        found = predict_noise_error(
            **QUICKSTART, delta=1e-3, sampling="cyclic_poisson", bands=bands
        )
        assert f"{found / white:.3f}" in PAGE.read_text(encoding="utf-8")
        assert found > white


def test_the_constants(rows_of: RowsOf) -> None:
    for bands, norm, error, size in rows_of(PROOFS, "bands")[1:]:
        found = NoiseCorrelation.square_root(int(bands), 250)
        assert f"{found.column_norm:.4f}" == norm
        assert f"{BandedStrategy(found.coefficients).prefix_error(250).rms:.3f}" == error
        total = np.abs(inverse_coefficients(found.coefficients, 3000)).sum()
        assert f"{total:.2f}" == size


def test_the_keys_of_the_example_exist() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    PrivacySettings.model_validate(yaml.safe_load(example)["privacy"])
