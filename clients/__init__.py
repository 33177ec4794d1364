"""Client side of a federation: local training, DP-SGD, privacy account and upload."""

if not __name__.startswith("fedsim."):
    raise ImportError(f"import fedsim.{__name__}, not {__name__}")

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsim.clients.privacy_engine.engine import PrivacyEngine as PrivacyEngine
    from fedsim.clients.privacy_engine.opacus_style import BatchMemoryManager as BatchMemoryManager
    from fedsim.clients.privacy_engine.opacus_style import ModuleValidator as ModuleValidator

# Loaded when first used: the settings of a client are read without importing torch.
_public = {
    "BatchMemoryManager": "fedsim.clients.privacy_engine.opacus_style",
    "ModuleValidator": "fedsim.clients.privacy_engine.opacus_style",
    "PrivacyEngine": "fedsim.clients.privacy_engine.engine",
}
__all__ = ["BatchMemoryManager", "ModuleValidator", "PrivacyEngine"]


def __getattr__(name: str) -> object:
    if name in _public:
        return getattr(_import_module(_public[name]), name)
    raise AttributeError(f"module 'fedsim.clients' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
