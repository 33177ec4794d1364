"""Evaluation of the global model on the server's public test set, every round and at the end."""

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

_FEW_EXAMPLES = 1024  # as many as one batch of an evaluation
Scores = TypeVar("Scores")
Models = ArrayRecord | Sequence[ArrayRecord]
"""The global model, or the models of the clients."""


@dataclass(frozen=True, eq=False)
class PublicScores:
    """The object that evaluates global models on the server's public test set.

    Attributes:
        model: the module into which each model's values are loaded, to evaluate the model.
        loss: the loss function, which returns one value per example.
        task: the kind of prediction (such as classification), which gives targets and metrics.
        test: the public test set.
        device: the device on which the model runs.
        chosen: the metrics that `evaluation.metrics` names; None for the task's default metrics.
        class_names: the names of the classes; None where the data do not name them.
    """

    model: nn.Module
    loss: PerExampleLoss
    task: Task
    test: Examples
    device: torch.device
    chosen: ChosenMetrics | None
    class_names: Sequence[str] | None

    def metrics(self, models: Models) -> dict[str, MetricValue]:
        """Return the loss and the metrics of a model on the test set, by name.

        For several models, the loss and the default metrics are means over the models. The metrics
        of `evaluation.metrics` are computed on the predictions of all models, pooled into one set.

        Args:
            models: the global model, or one personal model for each client.

        Raises:
            FederationError: a model, the loss or a metric fails.
        """
        if isinstance(models, ArrayRecord) and self.chosen is None:
            return self._of_model(models, lambda: {**evaluate(*self._parts, device=self.device)})
        known, outputs, targets = self._predict(models)
        if self.chosen is None:
            return {**known}
        chosen = self.chosen
        scores = self._guarded(lambda: chosen(known, outputs, targets))
        return {LOSS: known[LOSS], **scores}

    def by_class(self, models: Models, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of `scores.json`: a model's scores on the test set, for each class.

        Args:
            models: the global model, or one personal model for each client, whose predictions are
                pooled.
            metrics: the metrics of these models by name, which the result repeats.

        Raises:
            FederationError: a model or the loss fails.
        """
        _, outputs, targets = self._predict(models)

        def score() -> dict[str, Any]:
            predictions = predictions_of(self.task, outputs, targets)
            return summarise_scores(predictions, self.class_names, metrics)

        return self._guarded(score)

    def _predict(self, models: Models) -> tuple[dict[str, float], Tensor, Tensor]:
        """Return the mean task metrics, and outputs and targets (n, ...) of all models together."""
        records = [models] if isinstance(models, ArrayRecord) else models
        parts = [
            self._of_model(record, lambda: evaluate_with_outputs(*self._parts, device=self.device))
            for record in records
        ]
        known = {name: fmean(scores[name] for scores, _ in parts) for name in parts[0][0]}
        outputs = torch.cat([outputs for _, outputs in parts])
        return known, outputs, torch.cat([self._targets] * len(parts))

    def check(self) -> None:
        """Compute the chosen metrics of the initial model, so that a wrong metric fails early.

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
        """Return a score of a global model, with errors raised as errors of the federation."""

        def load_and_score() -> Scores:
            self.model.load_state_dict(arrays.to_torch_state_dict())
            return score()

        return self._guarded(load_and_score)

    def _guarded(self, score: Callable[[], Scores]) -> Scores:
        """Return a score, with errors raised as errors of the federation.

        This is no context manager: in one, contextlib would mistake the RuntimeError that reports
        a plug-in's StopIteration for that StopIteration itself.
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
