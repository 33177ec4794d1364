"""Metrics of the global model on every client's own data, for the experimenter's eyes only.

They are computed after the run from its final model, outside of every message. No ε covers them:
a client's accuracy on its private data reveals information about these data.
"""

from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from fedsim.models.metrics import evaluate
from fedsim.runs.files import SCHEMAS
from fedsim.runs.manifest import list_again
from fedsim.runs.saved_model import load_core

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation
    from fedsim.runs.directory import RunDirectory

FILE = "client_metrics.json"
WARNING = (
    "Computed on the clients' private training data, outside the federation's messages, for the "
    "experimenter alone. No ε covers these figures: do not publish them for private data."
)


def write_client_metrics(federation: "Federation", directory: "RunDirectory") -> None:
    """Write `client_metrics.json` of a finished run, and list it in the manifest.

    Args:
        federation: the federation of the same experiment; its model is overwritten.
        directory: the run directory with its `model.safetensors`.
    """
    trained = federation.model
    model = trained.module
    if federation.experiment.saves_derived_model:
        model = load_core(directory.path, base=federation.base).to(trained.device)
    else:
        path = directory.path / "model.safetensors"
        model.load_state_dict(load_file(str(path), device=str(trained.device)))
    rows: list[dict[str, Any]] = []
    for client, examples in enumerate(federation.data.clients):
        found = evaluate(model, trained.loss, trained.task, examples, device=trained.device)
        figures = {f"client_{name}": _finite(value) for name, value in found.items()}
        rows.append({"client": client, "examples": len(examples), **figures})
    content = {"schema": SCHEMAS[FILE], "private": True, "warning": WARNING, "clients": rows}
    directory.write_json(FILE, content)
    list_again(directory, FILE)


def _finite(value: float) -> float | None:
    return value if -float("inf") < value < float("inf") else None
