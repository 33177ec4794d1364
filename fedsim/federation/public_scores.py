"""Evaluation of the global model on the server's public test set, every round and at the end."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedsim.clients.app import one_thread
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.core.metrics import GROUP_ACCURACY, LOSS
from fedsim.core.plugin_errors import plugin_calls
from fedsim.data import Examples
from fedsim.data.load import ExampleGroups
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
        groups: the groups of the test examples, such as hospitals; None without groups.
        client_names: the names of the clients; None where they have only numbers.
    """

    model: nn.Module
    loss: PerExampleLoss
    task: Task
    test: Examples
    device: torch.device
    chosen: ChosenMetrics | None
    class_names: Sequence[str] | None
    groups: ExampleGroups | None = None
    client_names: Sequence[str] | None = None

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
        known, outputs = self._predict(models)
        if self.chosen is None:
            return {**known}
        chosen = self.chosen
        scores = self._guarded(lambda: self._chosen_values(chosen, known, outputs))
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
        _, outputs = self._predict(models)

        def score() -> dict[str, Any]:
            predictions = predictions_of(self.task, *self._pooled(outputs))
            by_class = summarise_scores(predictions, self.class_names, metrics)
            column = None if self.groups is None else self.groups.column
            return {**by_class, "group": column, "by_group": self._by_group(outputs)}

        return self._guarded(score)

    def _predict(self, models: Models) -> tuple[dict[str, float], list[Tensor]]:
        """Return the mean task metrics, and the outputs (n, ...) of each model."""
        records = [models] if isinstance(models, ArrayRecord) else models
        parts = [
            self._of_model(record, lambda: evaluate_with_outputs(*self._parts, device=self.device))
            for record in records
        ]
        known = {name: fmean(scores[name] for scores, _ in parts) for name in parts[0][0]}
        return known, [outputs for _, outputs in parts]

    def _pooled(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return outputs and targets (n, ...) of all models together."""
        return torch.cat([*outputs]), torch.cat([self._targets] * len(outputs))

    def _chosen_values(
        self, chosen: ChosenMetrics, known: Mapping[str, float], outputs: Sequence[Tensor]
    ) -> dict[str, MetricValue]:
        """Return the chosen metrics of the outputs (n, ...) of each model."""
        if GROUP_ACCURACY in chosen.names:
            mean = fmean(group["accuracy"] for group in self._by_group(outputs))
            known = {**known, GROUP_ACCURACY: mean}
        return chosen(known, *self._pooled(outputs))

    def _by_group(self, outputs: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the accuracy on each group of test examples, in the order of their names.

        If each client has a model and the groups are the clients, the accuracy of a group is that
        of its own client's model; otherwise it is the mean over the models.

        Args:
            outputs: the outputs (n, ...) of each model on the whole test set.
        """
        clients = list(self.client_names or ())
        is_by_client = len(outputs) == len(clients) > 1 and self._group_rows.keys() <= set(clients)
        rows = []
        for name, inside in self._group_rows.items():
            models = [outputs[clients.index(name)]] if is_by_client else outputs
            targets = self._targets[inside]
            scores = [self.task.score(model[inside], targets) for model in models]
            values = [self.task.metrics(score, targets.numpy())["accuracy"] for score in scores]
            rows.append({"group": name, "examples": len(targets), "accuracy": fmean(values)})
        return rows

    @cached_property
    def _group_rows(self) -> dict[str, Tensor]:
        """Rows of the test set in each group, by the group's name, in the order of the names."""
        groups = () if self.groups is None else self.groups.names
        rows: dict[str, list[int]] = {name: [] for name in sorted(set(groups))}
        for row, name in enumerate(groups):
            rows[name].append(row)
        return {name: torch.tensor(inside) for name, inside in rows.items()}

    def check(self) -> None:
        """Compute the chosen metrics of the initial model, so that a wrong metric fails early.

        Raises:
            MetricError: a metric does not fit the targets, or fails.
        """
        if self.groups is not None and self.task.name == "regression":
            raise MetricError(
                "evaluation.group: groups have accuracies, and the targets are numbers; remove it"
            )
        if self.chosen is not None:
            known, outputs = evaluate_with_outputs(*self._parts, device=self.device)
            self._chosen_values(self.chosen, known, [outputs])

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
