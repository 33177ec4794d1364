"""Clipped sums of per-example gradients: the interface of all methods that compute them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import Clipping, Groups
from fedsim.clients.gradients.layers.base import WHOLE, ExampleUse, Part
from fedsim.clients.gradients.model_randomness import ModelRandomness
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.core.errors import FedsimError
from fedsim.noise.grid import SUM_HEIGHT


@dataclass(frozen=True)
class BatchStatistics:
    """Counts of a batch's examples in clipping; they are private and need noise before release.

    Attributes:
        examples: number of examples.
        not_finite: number of examples that contributed zero as their gradient was not finite.
        within: number of examples with a gradient norm within the bound, for each group (m,).
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
    """Clipping rule, bounds and scales of the rows of a padded batch.

    Attributes:
        clipping: the clipping rule, the same for all clients up to its bounds.
        members: parameter indices of each group.
        bounds: clip norms C_m of each row's client, float64 (n, m); (1, m) with a single client.
        scales: factor of each row's clipped gradient in each group, float64 (n, m) or (n, 1); 0
            for a padding row.
    """

    clipping: Clipping
    members: Sequence[Sequence[int]]
    bounds: Tensor
    scales: Tensor

    @classmethod
    def of_client(cls, clipping: Clipping, groups: Groups, scales: Tensor) -> Self:
        """Return the bounds for a padded batch of one client.

        Args:
            clipping: the client's clipping rule.
            groups: groups of the model's parameters, with the client's bounds.
            scales: factor of each row's clipped gradient, float64 (n, m) or (n, 1).
        """
        return cls(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)


def clip_rows(norms: Tensor, clip: ClipBounds) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the scaled clip factors of rows, and which rows are dropped as not finite.

    Args:
        norms: gradient norms by group, float64 (n, m); those of dropped rows become NaN in place.
        clip: bounds and scales of the rows.

    Returns:
        The factors of the rows (n,) for each group, and which rows (n,) are dropped: None if none
        is.

    Guarantee: a row that is not finite in one group has factor 0 in all of them; a row's factors
    depend on that row alone.
    """
    dropped = None
    # The largest of numbers with NaN is NaN, which is not finite either. A GPU skips this test:
    # waiting for its result takes longer than to drop rows in every case.
    if norms.is_cuda or not math.isfinite(norms.max().item()):
        dropped = ~norms.isfinite().all(1)
        norms.masked_fill_(dropped.unsqueeze(1), torch.nan)
    factors = clip.clipping.clip_factors(norms, clip.bounds) * clip.scales
    if dropped is not None:
        factors = factors.masked_fill(dropped.unsqueeze(1), 0.0)
    return factors.unbind(1), dropped


def group_norms(
    squared_norms: Mapping[int, Tensor],
    rows: int,
    members: Sequence[Sequence[int]],
    like: Tensor,
) -> Tensor:
    """Return the gradient norm of each row in each group, float64 (n, m).

    Args:
        squared_norms: squared norms of the rows by parameter index, float64 (n,); unused
            parameters may be absent.
        rows: number of rows n.
        members: parameter indices of each group.
        like: a parameter, for the device.
    """
    columns = []
    for group in members:
        terms = [squared_norms[i] for i in group if i in squared_norms]
        total = like.new_zeros(rows, dtype=torch.float64)
        columns.append(sum(terms[1:], terms[0]) if terms else total)
    norms = torch.stack(columns, dim=1) if len(columns) > 1 else columns[0].unsqueeze(1)
    return norms.sqrt()


PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to losses (batch,)."""


class UncoveredParameterError(FedsimError, RuntimeError):
    """A model used parameters in a way that no layer rule covers.

    Attributes:
        indices: indices of these parameters.
    """

    def __init__(self, message: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices


@dataclass(frozen=True)
class PaddedBatch:
    """A padded batch: R rows of each of K clients, where rows without an example are zeros.

    Attributes:
        clients: number of clients K.
        features: features of the rows (K · R, ...), client after client.
        targets: targets of the rows (K · R, ...).
        weights: weights of the rows' losses (K · R,); 0 for padding rows.
        views: number of views V of each example, in successive rows; there are K · R · V rows then.
        randomness: source of the model's random numbers, keyed by example; None for torch's own, as
            in checks.
    """

    clients: int
    features: Tensor
    targets: Tensor
    weights: Tensor
    views: int = 1
    randomness: ModelRandomness | None = None

    @property
    def keyed(self) -> AbstractContextManager[object]:
        """Context of a forward pass in which random numbers are keyed by example."""
        return nullcontext() if self.randomness is None else self.randomness

    @property
    def example_weights(self) -> Tensor:
        """Weights of the examples (K · R,), which are those of their first views."""
        return self.weights[:: self.views]


class PerExampleGradients(ABC):
    """Computes sums of clipped per-example gradients of a model's trainable parameters.

    Args:
        model: the model; its trainable parameters become views of `parameters.data`.
        loss: function of outputs (n, ...) and targets (n, ...) that returns one value per example.
        parameters: flat layout of `model` if it exists already; None to make it.

    Attributes:
        stacks: whether a padded batch may have several clients.
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
        """Prepare for a step, and return the columns of the values that the step updates.

        Args:
            round_number: the round.
            step: number of the step in the round, from 0.
            values: each client's flat values (K, size) before the step.

        Returns:
            Slice of the columns of `values`, of the size of `parameters`; None for all columns.
        """
        return None

    def add_sums(self, values: Tensor, padded: PaddedBatch, into: Tensor) -> None:
        """Add each client's weighted sum of unclipped gradients to a tensor in place.

        Args:
            values: each client's flat parameters (K, size).
            padded: padded batch of n = K · R rows, with the weights of their losses.
            into: tensor (K, size) to add Σ_i weight_i · gradient_i to.

        Raises:
            TypeError: this method computes clipped sums only.
        """
        raise TypeError("training without privacy needs gradients by rules")

    @abstractmethod
    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        """Return the gradients of a padded batch's rows, by index of the parameter.

        A parameter that has no gradient is absent.

        Args:
            values: each client's flat parameters (K, size).
            padded: padded batch of n = K · R rows.
        """

    def gradients(self, features: Tensor, targets: Tensor, values: Tensor | None = None) -> Tensor:
        """Return the unclipped per-example gradients (n, size), for checks on a few examples.

        Args:
            features: features (n, ...), client after client.
            targets: targets (n, ...).
            values: each client's flat parameters (K, size); None for one client with the model's
                parameters.
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
        """Return scale · clip(gradient) of each example of a padded batch.

        The gradient of an example with several views is their mean, which is clipped once.

        Args:
            values: each client's flat parameters (K, size).
            padded: the padded batch.
            clip: bounds and scales of the examples.
        """
        gradients = by_example(self.row_gradients(values, padded), padded.views)
        return clipped_rows(gradients, clip, clients=padded.clients, times=1.0 / padded.views)

    def add_clipped_sums(
        self, values: Tensor, padded: PaddedBatch, clip: ClipBounds, into: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Add each client's scaled sum of clipped gradients to a tensor in place.

        Guarantee: the terms of the sum have the guarantee of `ClippedRows`.

        Args:
            values: each client's flat parameters (K, size).
            padded: the padded batch.
            clip: bounds and scales of the examples.
            into: tensor (K, size), float32 or float64, to add scale_k · Σ_i clip(gradient_i) to.

        Returns:
            Gradient norms by group, float64 (n, m), NaN for dropped examples; and which examples
            (n,) were dropped as their gradient is not finite, None if none was.
        """
        rows = self.clipped(values, padded, clip)
        rows.add_to(self.parameters.stacked_views(into))
        return rows.norms, rows.dropped

    def add_clipped_sum(
        self,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        *,
        scale: float = 1.0,
    ) -> BatchStatistics:
        """Add scale · Σ_i clip(gradient_i) of one client's n ≥ 0 examples to a tensor in place.

        Guarantee: the terms of the sum have the guarantee of `ClippedRows`.

        Args:
            features: features of the examples (n, ...).
            targets: targets of the examples (n, ...).
            clipping: the clipping rule.
            groups: groups of the model's parameters, with their bounds.
            into: tensor (size,), float64, to add to.
            scale: factor of the sum.
        """
        n = len(features)
        if n == 0:
            return BatchStatistics(0, 0, (0,) * len(groups.bounds))
        scales = torch.full((n, 1), scale, dtype=torch.float64, device=into.device)
        clip = ClipBounds.of_client(clipping, groups, scales)
        padded = PaddedBatch(1, features, targets, self.parameters.data.new_ones(n))
        values = self.parameters.data.unsqueeze(0)
        norms_and_dropped = self.add_clipped_sums(values, padded, clip, into.unsqueeze(0))
        return batch_statistics(clip, *norms_and_dropped)


def by_example(found: Mapping[int, ExampleUse], views: int) -> dict[int, ExampleUse]:
    """Return the gradients of examples by adding those of their views.

    Args:
        found: gradients of n · views rows by parameter; an example's views are successive rows.
        views: number of views of each example.

    Source: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification
    through Scale" (arXiv 2204.13650), section 3.2, up to the factor 1 / views.
    """
    if views == 1:
        return dict(found)
    joined = {id(use): use.joined_views(views) for use in found.values()}
    return {index: joined[id(use)] for index, use in found.items()}


@dataclass(frozen=True)
class ClippedRows:
    """The clipped gradients of a padded batch's n examples: gradients with clip factors.

    Guarantee: each example's term of a sum has an L2 norm of at most scale · C_m in each group m;
    padding rows, and examples whose gradient is not finite, add nothing. An example's term depends
    on its client's parameters and the shape of the padded batch, and on no other row.
    Only the rounding of a sum depends on other rows: `SumRounding` bounds it.

    Attributes:
        found: the gradients by parameter.
        members: parameter indices of each group.
        norms: gradient norms by group, float64 (n, m), NaN for dropped examples.
        factors: factors of the rows, float64 (K, R), for each group.
        dropped: which rows were dropped (n,); None if none was.
    """

    found: Mapping[int, ExampleUse]
    members: Sequence[Sequence[int]]
    norms: Tensor
    factors: Sequence[Tensor]
    dropped: Tensor | None

    @cached_property
    def _single(self) -> Sequence[Tensor]:
        return [factors.float() for factors in self.factors]

    @torch.no_grad()
    def add_to(self, into: Sequence[Tensor], part: Part = WHOLE) -> None:
        """Add the clipped gradients of a part of the padded batch to tensors in place.

        The order of the additions is the one that `SumRounding` assumes.

        Args:
            into: a tensor (k, *shape) for each parameter, for the k clients of the part; float64,
                or float32 where the batch is small enough for float32 sums.
            part: rows of the padded batch to add.
        """
        factors = self._single if into[0].dtype == torch.float32 else self.factors
        for rows in _runs(part.rows, factors[0].shape[1]):
            run = part if rows == part.rows else Part(part.client, rows)
            for group, column in zip(self.members, factors, strict=True):
                for index in group:
                    if index in self.found:
                        self.found[index].add_weighted(index, column, into[index], run)


def _runs(rows: slice, every: int) -> Iterator[slice]:
    """Yield slices of at most `SUM_HEIGHT` successive rows."""
    start, stop, _ = rows.indices(every)
    if stop - start <= SUM_HEIGHT:
        yield rows
        return
    for at in range(start, stop, SUM_HEIGHT):
        yield slice(at, min(at + SUM_HEIGHT, stop))


@torch.no_grad()
def clipped_rows(
    found: Mapping[int, ExampleUse],
    clip: ClipBounds,
    *,
    clients: int = 1,
    times: float = 1.0,
) -> ClippedRows:
    """Return scale_i · clip(times · gradient_i) of each of n rows.

    Args:
        found: the gradients by parameter; a parameter without gradients is absent.
        clip: bounds and scales of the rows.
        clients: number of clients K.
        times: factor of each gradient, such as n for gradients of a mean over the rows.
    """
    n, like = clip.scales.shape[0], clip.scales
    squared = {index: of.squared_norms(index) for index, of in sorted(found.items())}
    norms = group_norms(squared, n, clip.members, like)
    if times != 1:
        norms *= times
        clip = replace(clip, scales=clip.scales * times)
    factors, dropped = clip_rows(norms, clip)
    if dropped is not None:
        for of in {id(of): of for of in found.values()}.values():
            of.drop(dropped)
    columns = [factor.view(clients, -1) for factor in factors]
    return ClippedRows(found, clip.members, norms, columns, dropped)


def batch_statistics(clip: ClipBounds, norms: Tensor, dropped: Tensor | None) -> BatchStatistics:
    """Return the counts of examples in clipping for a padded batch of one client.

    Args:
        clip: bounds and scales of the rows; a row of scale 0 is a padding row.
        norms: gradient norms by group, float64 (n, m), NaN for dropped rows.
        dropped: which rows were dropped (n,); None if none was.
    """
    real = (clip.scales > 0).any(1)
    within = ((norms <= clip.bounds) & real.unsqueeze(1)).sum(0).tolist()
    lost = 0 if dropped is None else int((dropped & real).sum())
    return BatchStatistics(int(real.sum()), lost, tuple(within))
