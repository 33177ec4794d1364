"""Interface of all methods that compute clipped sums of per-example gradients.

The reference for any model is here too: plain autograd, one example at a time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import Clipping
from fedsim.clients.gradients.example_randomness import ModelRandomness
from fedsim.clients.gradients.layers.base import WHOLE, ExampleUse, Part, squared_norms
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.core.errors import FedsimError


@dataclass(frozen=True)
class BatchStatistics:
    """Counts of a batch's examples by gradient norm; private, so they need noise before release.

    Attributes:
        examples: number of examples.
        not_finite: number of examples that contributed zero because their gradient was not finite.
        within: for each of m parameter groups, the number of examples whose gradient norm in that
            group is at most the clipping norm.
    """

    examples: int
    not_finite: int
    within: tuple[int, ...]

    def __add__(self, other: "BatchStatistics") -> "BatchStatistics":
        """Return the counts of two physical batches together."""
        within = tuple(a + b for a, b in zip(self.within, other.within, strict=True))
        return BatchStatistics(
            self.examples + other.examples, self.not_finite + other.not_finite, within
        )


@dataclass(frozen=True)
class ClipBounds:
    """Clipping rule, norms and scales for n rows of a padded batch, in m parameter groups.

    Attributes:
        clipping: the clipping rule, equal for all clients except for its clipping norms.
        members: parameter indices of each group.
        bounds: clipping norms of each row, float64 (n, m), or (1, m) if they are equal for all
            rows.
        scales: factor that multiplies each row's clipped gradient in each group, float64 (n, m), or
            (n, 1) if it is equal in all groups; 0 for a padding row.
    """

    clipping: Clipping
    members: Sequence[Sequence[int]]
    bounds: Tensor
    scales: Tensor


PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to losses (batch,)."""


class UncoveredParameterError(FedsimError, RuntimeError):
    """Error: per-example gradients are unknown for the way in which a model used a parameter.

    Attributes:
        indices: indices of the parameters whose per-example gradients are unknown.
    """

    def __init__(self, message: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices


@dataclass(frozen=True)
class PaddedBatch:
    """Padded batch: R rows for each of K clients, where rows without an example are zeros.

    Attributes:
        clients: number of clients K.
        features: features of the rows (K · R, ...), client after client.
        targets: targets of the rows (K · R, ...).
        weights: weight of each row's loss (K · R,); 0 for padding rows.
        views: number of augmented views V of each example, in successive rows. If V > 1, the
            tensors above have K · R · V rows.
        randomness: source of the model's random numbers, which are a function of the example; with
            None, the model draws from torch's generator.
    """

    clients: int
    features: Tensor
    targets: Tensor
    weights: Tensor
    views: int = 1
    randomness: ModelRandomness | None = None

    @property
    def keyed(self) -> AbstractContextManager[object]:
        """Context in which the model draws random numbers from `randomness`, if it is set."""
        return nullcontext() if self.randomness is None else self.randomness

    @property
    def example_weights(self) -> Tensor:
        """Weight of each example's loss (K · R,), which all views of the example share."""
        return self.weights[:: self.views]


class PerExampleGradients(ABC):
    """Base class of methods that compute sums of clipped per-example gradients of a model.

    Args:
        model: the model; its trainable parameters become views of `parameters.data`.
        loss: function of outputs (n, ...) and targets (n, ...) that returns one value per example.
        parameters: flat layout of `model` if it exists already; None to make it.

    Attributes:
        stacks: whether a padded batch may have several clients; `gradients_for` tests this.
        draws: whether the model draws random numbers; None before the first pass.
    """

    stacks = False
    draws: bool | None = None

    def __init__(
        self, model: nn.Module, loss: PerExampleLoss, *, parameters: FlatParameters | None = None
    ) -> None:
        self.model = model
        self.loss = loss
        self.parameters = FlatParameters(model) if parameters is None else parameters

    def begin_step(self, round_number: int, step: int, values: Tensor) -> slice | None:
        """Prepare a training step, and return which columns of `values` the step updates.

        Gradients update all parameters, so the result is None. A subclass may return a slice.

        Args:
            round_number: number of the round.
            step: number of the step in the round, from 0.
            values: flat parameter values of each of K clients (K, size) before the step.

        Returns:
            None for all columns; or a slice of as many columns as `parameters` has values.
        """
        return None

    def add_sums(self, values: Tensor, padded: PaddedBatch, into: Tensor) -> None:
        """Add each client's weighted sum of unclipped gradients to a tensor in place.

        Args:
            values: flat parameters of each of K clients (K, size).
            padded: padded batch with R rows of each client, and the weights of their losses.
            into: tensor (K, size) to which Σ_i weight_i · gradient_i is added.

        Raises:
            TypeError: the subclass can compute clipped sums only.
        """
        raise TypeError("training without privacy needs gradients by rules")

    @abstractmethod
    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return a dict from parameter index to the gradients of all rows of a padded batch.

        A parameter that has no gradient is absent.

        Args:
            values: flat parameters of each of K clients (K, size).
            padded: padded batch with R rows of each client.
        """

    def gradients(self, features: Tensor, targets: Tensor, values: Tensor | None = None) -> Tensor:
        """Return the unclipped per-example gradients (n, size), for checks on a few examples.

        Args:
            features: features of n examples (n, ...), client after client.
            targets: targets (n, ...).
            values: flat parameters of each of K clients (K, size); with None, all examples belong
                to one client, with the model's parameters.
        """
        data = self.parameters.data
        values = data.unsqueeze(0) if values is None else values
        padded = PaddedBatch(len(values), features, targets, data.new_ones(len(features)))
        rows = data.new_zeros(len(features), self.parameters.size)
        places = self.parameters.slices(range(len(self.parameters.tensors)))
        with torch.no_grad():
            for index, use in self.row_gradients(values, padded).items():
                rows[:, places[index]] = use.per_example(index).reshape(len(rows), -1)
        return rows

    def clipped(self, values: Tensor, padded: PaddedBatch, clip: ClipBounds) -> "ClippedRows":
        """Return the clipped and scaled gradient of each example of a padded batch.

        The gradient of an example with several augmented views is the mean over its views. It is
        clipped once, and then multiplied by the example's scale.

        Args:
            values: flat parameters of each of K clients (K, size).
            padded: the padded batch.
            clip: clipping norms and scales of the examples.
        """
        gradients = by_example(self.row_gradients(values, padded), padded.views)
        return clipped_rows(gradients, clip, clients=padded.clients, times=1.0 / padded.views)


def by_example(uses: Mapping[int, ExampleUse], views: int) -> dict[int, ExampleUse]:
    """Return the gradient of each example: the sum of the gradients of its augmented views.

    Args:
        uses: for each parameter index, the gradients of n · views rows; an example's views are
            successive rows.
        views: number of views of each example.

    Source: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification
    through Scale" (arXiv 2204.13650), section 3.2, up to the factor 1 / views.
    """
    if views == 1:
        return dict(uses)
    joined = {id(use): use.joined_views(views) for use in uses.values()}
    return {index: joined[id(use)] for index, use in uses.items()}


@dataclass(frozen=True)
class ClippedRows:
    """Clipped gradients of a padded batch: the gradients of n examples, and their clip factors.

    Guarantee: each example's term of a sum has an L2 norm of at most its scale times the clipping
    norm, in each parameter group; padding rows, and examples whose gradient is not finite, add
    nothing. An example's term depends on its client's parameters and the shape of the padded batch,
    and on no other row. Only the rounding of a sum depends on other rows: `SumRounding` bounds it.

    Attributes:
        uses: for each parameter index, the gradients of the n examples before clipping.
        members: parameter indices of each of the m groups.
        norms: gradient norms by group, float64 (n, m), NaN for examples in `dropped`.
        factors: for each group, the factor by which each of the R rows of K clients is multiplied,
            float64 (K, R).
        dropped: booleans (n,), true for examples whose gradient is not finite; these are dropped,
            with factor 0. It may be None if there are none.
    """

    uses: Mapping[int, ExampleUse]
    members: Sequence[Sequence[int]]
    norms: Tensor
    factors: Sequence[Tensor]
    dropped: Tensor | None

    @cached_property
    def _single(self) -> Sequence[Tensor]:
        return [factors.float() for factors in self.factors]

    def add_to(
        self, into: Sequence[Tensor], part: Part = WHOLE, *, overwrite: bool = False
    ) -> None:
        """Add the clipped gradients of some rows of the padded batch to tensors in place.

        The order of the additions is the one that `SumRounding` assumes.

        Args:
            into: a tensor (k, *shape) for each parameter, with one entry for each of the k clients
                whose rows are added; float64, or float32 if float32 sums are precise enough.
            part: the rows of the padded batch that are added; the default is all rows of all
                clients.
            overwrite: whether the previous content of the tensors is dropped.
        """
        factors = self._single if into[0].dtype == torch.float32 else self.factors
        for group, column in zip(self.members, factors, strict=True):
            for index in group:
                use = self.uses.get(index)
                if use is not None:
                    use.add_runs(index, column, into[index], part, overwrite=overwrite)
                elif overwrite:
                    into[index].zero_()


def clipped_rows(
    uses: Mapping[int, ExampleUse],
    clip: ClipBounds,
    *,
    clients: int = 1,
    times: float = 1.0,
) -> ClippedRows:
    """Clip and scale gradients: return scale_i · clip(times · gradient_i) for each of n rows i.

    Args:
        uses: for each parameter index, the gradients of the rows; a parameter without gradients is
            absent.
        clip: clipping norms and scales of the rows.
        clients: number of clients K.
        times: factor of each gradient before clipping, such as n for gradients of a mean over rows.
    """
    squared, totals = squared_norms(uses), list[Tensor]()
    for group in clip.members:
        terms = [squared[index] for index in group if index in squared]
        totals.append(reduce(torch.add, terms) if terms else torch.zeros_like(clip.scales[:, 0]))
    norms, scales, dropped = torch.stack(totals, 1).sqrt_(), clip.scales, None
    if times != 1:
        norms, scales = norms.mul_(times), scales * times
    # The largest of numbers with NaN is NaN, which is not finite either. A GPU skips this test:
    # waiting for its result takes longer than to drop rows in every case.
    if norms.is_cuda or not math.isfinite(norms.max().item()):
        dropped = ~norms.isfinite().all(1)
        norms.masked_fill_(dropped.unsqueeze(1), torch.nan)
    factors = clip.clipping.clip_factors(norms, clip.bounds).mul_(scales)
    if dropped is not None:
        factors.masked_fill_(dropped.unsqueeze(1), 0.0)
        for of in {id(of): of for of in uses.values()}.values():
            of.drop(dropped)
    columns = [column.view(clients, -1) for column in factors.unbind(1)]
    return ClippedRows(uses, clip.members, norms, columns, dropped)


class OneAtATime(PerExampleGradients):
    """Gradient method that computes per-example gradients in a loop, one example at a time."""

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return a dict from parameter index to the gradients of all rows of a padded batch.

        Args:
            values: not used, as the model holds the client's parameters.
            padded: padded batch of one client.
        """
        gradients = list[Sequence[Tensor]]()
        pairs = zip(padded.features.split(1), padded.targets.split(1), strict=True)
        for row, (x, y) in enumerate(pairs):
            if padded.randomness is not None:
                padded.randomness.only(row)
            with padded.keyed:
                gradients.append(self._of_example(x, y))
        held = {i: torch.stack(parts) for i, parts in enumerate(zip(*gradients, strict=True))}
        return dict.fromkeys(held, ExampleUse(held))

    def _of_example(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        with torch.enable_grad():
            value = self.loss(self.model(x), y).sum()
        tensors = self.parameters.tensors
        if not value.requires_grad:  # a branch without parameters
            return [torch.zeros_like(p) for p in tensors]
        return torch.autograd.grad(value, tensors, materialize_grads=True)
