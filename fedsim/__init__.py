"""fedsim: federated learning with local differential privacy, simulated from one YAML file."""

import os as _os
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if __name__ != "fedsim":  # e.g. `import fedsim.fedsim` in a checkout: it would copy every class
    raise ImportError(f"import fedsim, not {__name__}")

# In a checkout, fedsim.clients, fedsim.server and fedsim.accountant are the directories
# beside this one (an installed fedsim holds them inside itself; see pyproject.toml).
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "accountant").is_dir():
    __path__.append(str(_checkout))

# Dependencies read these when they are imported, and fedsim itself must not access the network.
# To have the telemetry, set the variable before importing fedsim.
for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),  # otherwise Ray warns in every run
):
    _os.environ.setdefault(_name, _value)

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedsim import accountant as accountant
    from fedsim import clients as clients
    from fedsim import testing as testing
    from fedsim.api import run as run
    from fedsim.comparison.compare import compare as compare
    from fedsim.comparison.compare import compare_runs as compare_runs
    from fedsim.comparison.comparison_result import ComparisonResult as ComparisonResult
    from fedsim.core.errors import FedsimError as FedsimError
    from fedsim.experiment import ExperimentError as ExperimentError
    from fedsim.personalization.personalize import personalize as personalize
    from fedsim.report.progress import ProgressCallback as ProgressCallback
    from fedsim.runs.run_result import RunFailedError as RunFailedError
    from fedsim.runs.run_result import RunResult as RunResult
    from fedsim.runs.saved_model import load_model as load_model
    from fedsim.runs.saved_model import predict as predict
    from fedsim.runs.saved_model import read_model_card as read_model_card
    from fedsim.tools.search.perform import SearchResult as SearchResult
    from fedsim.tools.search.perform import search as search
    from fedsim.tracking.callbacks import RunCallback as RunCallback
    from fedsim.tracking.callbacks import TrackedRun as TrackedRun
    from fedsim.tracking.callbacks import Tracker as Tracker

# Loaded when first used: `fedsim --help` answers without importing torch or Flower.
_public = {
    "ComparisonResult": "fedsim.comparison.comparison_result",
    "ExperimentError": "fedsim.experiment",
    "FedsimError": "fedsim.core.errors",
    "ProgressCallback": "fedsim.report.progress",
    "RunFailedError": "fedsim.runs.run_result",
    "RunCallback": "fedsim.tracking.callbacks",
    "RunResult": "fedsim.runs.run_result",
    "SearchResult": "fedsim.tools.search.perform",
    "TrackedRun": "fedsim.tracking.callbacks",
    "Tracker": "fedsim.tracking.callbacks",
    "compare": "fedsim.comparison.compare",
    "compare_runs": "fedsim.comparison.compare",
    "load_model": "fedsim.runs.saved_model",
    "personalize": "fedsim.personalization.personalize",
    "predict": "fedsim.runs.saved_model",
    "read_model_card": "fedsim.runs.saved_model",
    "run": "fedsim.api",
    "search": "fedsim.tools.search.perform",
}
_modules = ("accountant", "clients", "testing")
__all__ = [
    "ComparisonResult",
    "ExperimentError",
    "FedsimError",
    "ProgressCallback",
    "RunCallback",
    "RunFailedError",
    "RunResult",
    "SearchResult",
    "TrackedRun",
    "Tracker",
    "__version__",
    "accountant",
    "clients",
    "compare",
    "compare_runs",
    "load_model",
    "personalize",
    "predict",
    "read_model_card",
    "run",
    "search",
    "testing",
]


def __getattr__(name: str) -> object:
    if name in _public:
        return getattr(_import_module(_public[name]), name)
    if name in _modules:
        return _import_module(f"fedsim.{name}")
    if name in _import_module("fedsim.clients").__all__:  # as Opacus has it: `from opacus import`
        raise ImportError(f"write `from fedsim.clients import {name}`")
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names and Python's own names; submodules are found by `import`."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
