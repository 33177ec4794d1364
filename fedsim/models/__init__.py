"""Models, per-example losses, feature transforms and task metrics."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsim.models.build import build_model as build_model
    from fedsim.models.catalog import ModelError as ModelError
    from fedsim.models.losses import PerExampleLoss as PerExampleLoss
    from fedsim.models.losses import check_loss as check_loss
    from fedsim.models.losses import resolve_loss as resolve_loss
    from fedsim.models.tasks import Task as Task
    from fedsim.models.tasks import evaluate as evaluate
    from fedsim.models.tasks import task_for as task_for

# Imported on first use: `fedsim --help` imports settings and catalog without torch.
_public = {
    "ModelError": "fedsim.models.catalog",
    "PerExampleLoss": "fedsim.models.losses",
    "Task": "fedsim.models.tasks",
    "build_model": "fedsim.models.build",
    "check_loss": "fedsim.models.losses",
    "evaluate": "fedsim.models.tasks",
    "resolve_loss": "fedsim.models.losses",
    "task_for": "fedsim.models.tasks",
}
__all__ = [
    "ModelError",
    "PerExampleLoss",
    "Task",
    "build_model",
    "check_loss",
    "evaluate",
    "resolve_loss",
    "task_for",
]


def __getattr__(name: str) -> object:
    if name in _public:
        return getattr(_import_module(_public[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
