"""The scripts of benchmarks/ as modules: imported, not started."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have the scripts find each other; skip where there is no checkout."""
    import torch

    if not BENCHMARKS.exists():
        pytest.skip("imports the scripts of a checkout")
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield BENCHMARKS
    torch.set_num_threads(threads)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script; its name in `sys.modules` is not that of a package of the project."""

    def load(name: str) -> ModuleType:
        full = f"benchmark_of_{name}"
        spec = importlib.util.spec_from_file_location(full, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, full, module)
        spec.loader.exec_module(module)
        return module

    return load
