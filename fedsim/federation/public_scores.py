"""Scores of the global model on the server's public test set: every round, and at the end."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.clients.app import one_thread
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.core.metrics import LOSS
from fedsim.core.plugin_errors import plugin_calls
from fedsim.data import Examples
from fedsim.models.catalog import MetricError, ModelError
from fedsim.models.scores.metrics import ChosenMetrics, MetricValue, summarise_scores
from fedsim.models.scores.predictions import predictions_of
from fedsim.models.tasks import Task, evaluate, evaluate_with_outputs
from fedsim.protocol.errors import FederationError

_FEW_EXAMPLES = 1024  # one batch of an evaluation
Scores = TypeVar("Scores")
Models = ArrayRecord | Sequence[ArrayRecord]
"""A global model, or the models of the clients."""


@dataclass(frozen=True, eq=False)
class PublicScores:
    """How the server scores a global model.

    Attributes:
        model: takes the values of each scored model.
        loss: one value per example.
        task: targets and metrics of the loss.
        test: the public test set.
        device: where the model runs.
        chosen: the metrics of `evaluation.metrics`; None: those of the task.
        class_names: names of the classes; None where the data do not name them.
    """

    model: nn.Module
    loss: PerExampleLoss
    task: Task
    test: Examples
    device: torch.device
    chosen: ChosenMetrics | None
    class_names: Sequence[str] | None

    def metrics(self, models: Models) -> dict[str, MetricValue]:
        """Return the loss and the metrics of a model by name.

        Several models are scored as one set of predictions, each model's of all test examples. So
        loss and accuracy are means over the models.

        Args:
            models: the global model, or the clients' own ones.

        Raises:
            FederationError: a model, the loss or a metric fails.
        """
        if isinstance(models, ArrayRecord) and self.chosen is None:
            return self._of_model(models, lambda: {**evaluate(*self._parts, device=self.device)})
        known, outputs, targets = self._predict(models)
        if self.chosen is None:
            return {**known}
        chosen = self.chosen
        found = self._guarded(lambda: chosen(known, outputs, targets))
        return {LOSS: known[LOSS], **found}

    def by_class(self, models: Models, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of a model class by class, as in `scores.json`.

        Args:
            models: as `metrics`.
            metrics: their metrics by name, for the result.

        Raises:
            FederationError: a model or the loss fails.
        """
        _, outputs, targets = self._predict(models)

        def score() -> dict[str, Any]:
            found = predictions_of(self.task, outputs, targets)
            return summarise_scores(found, self.class_names, metrics)

        return self._guarded(score)

    def _predict(self, models: Models) -> tuple[dict[str, float], Tensor, Tensor]:
        """Return the mean metrics of the task, and outputs and targets of all models (n, ...)."""
        each = [models] if isinstance(models, ArrayRecord) else models
        parts = [
            self._of_model(one, lambda: evaluate_with_outputs(*self._parts, device=self.device))
            for one in each
        ]
        known = {name: fmean(found[name] for found, _ in parts) for name in parts[0][0]}
        outputs = torch.cat([outputs for _, outputs in parts])
        return known, outputs, torch.cat([self._targets] * len(parts))

    def check(self) -> None:
        """Score the initial model by the chosen metrics, so that no run ends at a wrong one.

        Raises:
            MetricError: a metric does not fit the targets, or fails.
        """
        if self.chosen is not None:
            self.chosen(*evaluate_with_outputs(*self._parts, device=self.device), self._targets)

    @property
    def _parts(self) -> tuple[nn.Module, PerExampleLoss, Task, Examples]:
        return self.model, self.loss, self.task, self.test

    @property
    def _targets(self) -> Tensor:
        return torch.from_numpy(self.test.targets)

    def _of_model(self, arrays: ArrayRecord, score: Callable[[], Scores]) -> Scores:
        """Return a score of a global model; its errors are errors of the federation."""

        def load_and_score() -> Scores:
            self.model.load_state_dict(arrays.to_torch_state_dict())
            return score()

        return self._guarded(load_and_score)

    def _guarded(self, score: Callable[[], Scores]) -> Scores:
        """Return a score; its errors are errors of the federation.

        A function, not a context: a generator that answers a plug-in's StopIteration by a
        RuntimeError is taken by contextlib for one that let it through.
        """
        # Threads cost more than they gain on few examples, most of all where processors are busy.
        threads = one_thread() if len(self.test) <= _FEW_EXAMPLES else nullcontext()
        try:
            with (
                threads,
                plugin_calls("the global model failed on the test set", raises=FederationError),
            ):
                return score()
        except MetricError as error:
            raise FederationError(str(error)) from error
        except ModelError as error:
            raise FederationError(f"the global model does not fit the test set: {error}") from error
