"""Datasets (built-in and user-defined), the held-out test set, and partitions among clients."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsim.data.examples import DataError as DataError
    from fedsim.data.examples import Examples as Examples
    from fedsim.data.load import FederatedData as FederatedData
    from fedsim.data.load import load_federated_data as load_federated_data

# Imported on first use: `fedsim --help` imports settings and catalog without numpy.
_public = {
    "DataError": "fedsim.data.examples",
    "Examples": "fedsim.data.examples",
    "FederatedData": "fedsim.data.load",
    "load_federated_data": "fedsim.data.load",
}
__all__ = ["DataError", "Examples", "FederatedData", "load_federated_data"]


def __getattr__(name: str) -> object:
    if name in _public:
        return getattr(_import_module(_public[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
