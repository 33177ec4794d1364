"""The package `experiments.reproductions` of a checkout."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "experiments" / "reproductions").exists():
        pytest.skip("measures the reproductions of a checkout")
    monkeypatch.syspath_prepend(ROOT)
