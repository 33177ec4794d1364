"""`client_data.json`: figures of the clients' private data, for the experimenter's eyes.

They are computed after the last round, outside of every message, and no ε covers them. So they are
written only where nothing is promised about the data: without differential privacy and without
secure aggregation, as for `evaluation.holdout`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedsim.core.plugin_errors import plugin_calls
from fedsim.experiment import Experiment
from fedsim.federation.federation import Federation
from fedsim.models.metrics import evaluate_with_outputs
from fedsim.models.scores.metrics import class_names
from fedsim.models.scores.predictions import ClassPredictions, predictions_of
from fedsim.protocol.errors import FederationError
from fedsim.runs.files import SCHEMAS

FILE = "client_data.json"
NOTE = (
    "Figures of the clients' own examples, for the experimenter's eyes: no ε covers them. They are "
    "written only in runs without differential privacy and without secure aggregation."
)
MAX_COUNTS = 1_000_000  # clients times classes; a larger table is left out


def may_write(experiment: Experiment) -> bool:
    """Whether an experiment promises nothing that these figures would break."""
    return experiment.privacy is None and experiment.secure_aggregation is None


def client_data(federation: Federation, arrays: ArrayRecord | None) -> dict[str, Any] | None:
    """Return the content of the file; None where it may not be written, or there are no classes.

    Args:
        federation: the federation; its model is overwritten.
        arrays: the final global model; None: it is not scored.
    """
    data = federation.data
    count = None if federation.model.task.name == "regression" else data.num_classes
    if not may_write(federation.experiment) or count is None:
        return None
    if count * len(data.clients) > MAX_COUNTS:
        return None
    clients = [
        {"client": client, "labels": _counts(data.clients.targets(client), count)}
        for client in range(len(data.clients))
    ]
    if arrays is not None:
        for row, scores in zip(clients, _held_out(federation, arrays, count), strict=False):
            row.update(scores)
    return {
        "schema": SCHEMAS[FILE],
        "figures_of": "private data",
        "note": NOTE,
        "classes": class_names(count, data.class_names),
        "clients": clients,
    }


def client_data_problems(
    experiment: Experiment, sizes: Sequence[int | None], content: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield what does not belong, or contradicts the other files.

    Args:
        experiment: `experiment.yaml`.
        sizes: number of examples of each client, by `privacy.json`.
        content: the file; None where there is none.
    """
    if content is None:
        return
    if not may_write(experiment):
        yield f"{FILE} holds figures of private data, in a run that promises to protect them"
        return
    classes, rows = content["classes"], content["clients"]
    if [row["client"] for row in rows] != list(range(len(sizes))):
        yield f"{FILE}: its clients are not those of privacy.json"
    for row, size in zip(rows, sizes, strict=False):
        name, held_out = f"{FILE}: client {row['client']}", row.get("held_out")
        if len(row["labels"]) != len(classes) or sum(row["labels"]) != size:
            yield f"{name} has other examples than in privacy.json"
        if held_out is None:
            continue
        pairs = list(zip(row["correct"], held_out, strict=True))
        if len(pairs) != len(classes) or any(not 0 <= hits <= n for hits, n in pairs):
            yield f"{name} has more correct predictions than held-out examples"


def _held_out(
    federation: Federation, arrays: ArrayRecord, count: int
) -> Iterator[dict[str, list[int]]]:
    """Yield the held-out examples of each client by class, and how many are predicted rightly."""
    held_out = federation.data.held_out
    if federation.experiment.client_evaluation is None or held_out is None:
        return
    model = federation.model
    model.module.load_state_dict(arrays.to_torch_state_dict())
    for client in range(len(held_out)):
        examples = held_out[client]
        hits = [0] * count
        if len(examples):
            with plugin_calls(
                "the global model failed on held-out examples", raises=FederationError
            ):
                _, outputs = evaluate_with_outputs(
                    model.module, model.loss, model.task, examples, device=model.device
                )
            found = predictions_of(model.task, outputs, torch.from_numpy(examples.targets))
            if not isinstance(found, ClassPredictions):
                return
            hits = _counts(found.targets[found.predicted == found.targets], count)
        yield {"held_out": _counts(examples.targets, count), "correct": hits}


def _counts(targets: np.ndarray, count: int) -> list[int]:
    """Return the number of examples of each class."""
    return np.bincount(np.asarray(targets, np.int64).ravel(), minlength=count).tolist()
