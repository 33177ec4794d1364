"""Per-example gradients, clipped and added up: the interface of all ways to compute them."""

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
class LotStatistics:
    """What happened to the examples of a lot. Private: to be noised before it goes anywhere.

    Attributes:
        examples: number of examples.
        not_finite: how many contributed zero because their gradient was not finite.
        within: how many had a norm within the bound, by group (m,).
    """

    examples: int
    not_finite: int
    within: tuple[int, ...]

    def __add__(self, other: "LotStatistics") -> "LotStatistics":
        """Return the statistics of two parts of a lot together."""
        within = tuple(a + b for a, b in zip(self.within, other.within, strict=True))
        return LotStatistics(
            self.examples + other.examples, self.not_finite + other.not_finite, within
        )


@dataclass(frozen=True)
class ClipBounds:
    """How the rows of a tile are clipped.

    Attributes:
        clipping: the rule, the same for all clients up to its bounds.
        members: parameter indices of each group.
        bounds: C_m of each row's client, float64 (n, m); or (1, m) where all have one client.
        scales: factor of each row's clipped gradient in each group, float64 (n, m) or (n, 1); 0
            for a row that is no example.
    """

    clipping: Clipping
    members: Sequence[Sequence[int]]
    bounds: Tensor
    scales: Tensor

    @classmethod
    def of_client(cls, clipping: Clipping, groups: Groups, scales: Tensor) -> Self:
        """Return the bounds of rows of one client.

        Args:
            clipping: the rule.
            groups: of the model.
            scales: factor of each row's clipped gradient, float64 (n, m) or (n, 1).
        """
        return cls(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)


def clip_rows(norms: Tensor, clip: ClipBounds) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the factor of each row in each group, and the rows (n,) to be dropped.

    Args:
        norms: by group, float64 (n, m); changed in place: those of dropped rows become NaN.
        clip: bounds and scales.

    Guarantee: a row that is not finite in one group has factor 0 in all of them; a row's factors
    depend on that row alone.
    """
    dropped = None
    # The largest of numbers with NaN is NaN, which is not finite either. A device is not asked: an
    # answer would take longer than to drop rows that are zero anyway.
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
    """Return the norms by group, float64 (n, m).

    Args:
        squared_norms: by parameter index, float64 (n,); unused parameters may be absent.
        rows: n.
        members: parameter indices of each group.
        like: a parameter, for the device.
    """
    columns = []
    for group in members:
        found = [squared_norms[i] for i in group if i in squared_norms]
        total = like.new_zeros(rows, dtype=torch.float64)
        columns.append(sum(found[1:], found[0]) if found else total)
    norms = torch.stack(columns, dim=1) if len(columns) > 1 else columns[0].unsqueeze(1)
    return norms.sqrt()


PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to losses (batch,)."""


class UncoveredParameterError(FedsimError, RuntimeError):
    """A model used parameters in a way that no rule covers.

    Attributes:
        indices: the parameters, by index.
    """

    def __init__(self, message: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices


@dataclass(frozen=True)
class Tile:
    """Rows of K clients, R each: the examples of one pass, and zeros where there are fewer.

    Attributes:
        clients: K.
        features: (K · R, ...), client after client.
        targets: (K · R, ...).
        weights: of the rows' losses (K · R,): 0 for rows that are no examples.
        views: V: with several views of each example, side by side, there are K · R · V rows.
        randomness: of the model, where it is keyed by the example; None: by place, as in checks.
    """

    clients: int
    features: Tensor
    targets: Tensor
    weights: Tensor
    views: int = 1
    randomness: ModelRandomness | None = None

    @property
    def keyed(self) -> AbstractContextManager[object]:
        """What a forward pass enters, so that random numbers of an example are its own."""
        return nullcontext() if self.randomness is None else self.randomness

    @property
    def example_weights(self) -> Tensor:
        """The weights of the examples (K · R,): those of their first views."""
        return self.weights[:: self.views]


class PerExampleGradients(ABC):
    """Computes sums of clipped per-example gradients of a model's trainable parameters.

    Args:
        model: its trainable parameters become views of `parameters.data`.
        loss: one value per example, from outputs (n, ...) and targets (n, ...).
        parameters: as laid out before; None: they are laid out here.

    Attributes:
        stacks: whether a tile may have several clients.
        draws: whether the model draws random numbers; None: no pass has shown it yet.
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
        """Prepare for a step, and return the part of the values that its release moves.

        Args:
            round_number: the round.
            step: of the round, from 0.
            values: each client's flat values (K, size) before the step.

        Returns:
            Columns of `values`, as many as `parameters` has values; None: all of them.
        """
        return None

    def add_sums(self, values: Tensor, tile: Tile, into: Tensor) -> None:
        """Add Σ_i weight_i · gradient_i of each client's rows to `into` (K, size), not clipped.

        Args:
            values: each client's flat parameters (K, size).
            tile: n = K · R rows and the weights of their losses.
            into: (K, size).

        Raises:
            TypeError: gradients of this kind are for clipped sums alone.
        """
        raise TypeError("training without privacy needs gradients by rules")

    @abstractmethod
    def row_gradients(self, values: Tensor, tile: Tile) -> Mapping[int, ExampleUse]:
        """Return the gradients of a tile's rows by parameter; parameters without one are absent.

        Args:
            values: each client's flat parameters (K, size).
            tile: n = K · R rows.
        """

    def gradients(self, features: Tensor, targets: Tensor, values: Tensor | None = None) -> Tensor:
        """Return all gradients (n, size), not clipped: for checks, on a few examples.

        Args:
            features: (n, ...), the rows of client after client.
            targets: (n, ...).
            values: each client's flat parameters (K, size); None: one client with the model's.
        """
        data = self.parameters.data
        values = data.unsqueeze(0) if values is None else values
        tile = Tile(len(values), features, targets, data.new_ones(len(features)))
        rows = data.new_zeros(len(features), self.parameters.size)
        places = self.parameters.slices(range(len(self.parameters.tensors)))
        with torch.no_grad():
            for index, use in self.row_gradients(values, tile).items():
                rows[:, places[index]] = use.per_example(index).reshape(len(rows), -1)
        return rows

    def clipped(self, values: Tensor, tile: Tile, clip: ClipBounds) -> "ClippedRows":
        """Return scale · clip(gradient) of each example of a tile, to be added up.

        An example with several views has the mean of their gradients, which is clipped once.

        Args:
            values: each client's flat parameters (K, size).
            tile: the rows.
            clip: bounds and scales.
        """
        found = by_example(self.row_gradients(values, tile), tile.views)
        return clipped_rows(found, clip, clients=tile.clients, times=1.0 / tile.views)

    def add_clipped_sums(
        self, values: Tensor, tile: Tile, clip: ClipBounds, into: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Add scale_k · Σ_i clip(gradient_i) of each client's examples to `into` (K, size).

        Guarantee: as of `ClippedRows`.

        Args:
            values: each client's flat parameters (K, size).
            tile: the rows.
            clip: bounds and scales.
            into: (K, size), float32 or float64.

        Returns:
            Norms by group, float64 (n, m), NaN for dropped examples; and which examples (n,) were
            dropped since their gradient is not finite, None if none was.
        """
        rows = self.clipped(values, tile, clip)
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
    ) -> LotStatistics:
        """Add scale · Σ_i clip(gradient_i) of one client's n ≥ 0 examples to float64 (size,).

        Guarantee: as of `add_clipped_sums`.
        """
        n = len(features)
        if n == 0:
            return LotStatistics(0, 0, (0,) * len(groups.bounds))
        scales = torch.full((n, 1), scale, dtype=torch.float64, device=into.device)
        clip = ClipBounds.of_client(clipping, groups, scales)
        tile = Tile(1, features, targets, self.parameters.data.new_ones(n))
        values = self.parameters.data.unsqueeze(0)
        found = self.add_clipped_sums(values, tile, clip, into.unsqueeze(0))
        return lot_statistics(clip, *found)


def by_example(found: Mapping[int, ExampleUse], views: int) -> dict[int, ExampleUse]:
    """Return gradients of examples from those of rows, of which each example has several.

    Args:
        found: by parameter, of n · views rows; the rows of an example are side by side.
        views: rows of an example; their gradients are added.

    Source: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification
    through Scale" (arXiv 2204.13650), section 3.2, up to the factor 1 / views.
    """
    if views == 1:
        return dict(found)
    joined = {id(use): use.joined_views(views) for use in found.values()}
    return {index: joined[id(use)] for index, use in found.items()}


@dataclass(frozen=True)
class ClippedRows:
    """The clipped gradients of a tile's n examples, as factors of their gradients.

    Guarantee: each example's part of a sum has an L2 norm of at most scale · C_m in each group m;
    padding rows, and examples whose gradient is not finite, add nothing. What an example adds
    depends on its client's values and the shape of the tile, and on no other row.
    Only the rounding of a sum depends on the others: `SumRounding` bounds it.

    Attributes:
        found: the gradients by parameter.
        members: parameter indices of each group.
        norms: by group, float64 (n, m), NaN for dropped examples.
        factors: of each row in each group, float64 (K, R) each.
        dropped: which rows were dropped (n,); None: none.
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
        """Add the clipped gradients of a part of the tile up, as `SumRounding` says.

        Args:
            into: (k, *shape) of each parameter, for the k clients of the part; float64, or float32
                for lots that may be added up in it.
            part: of the tile.
        """
        factors = self._single if into[0].dtype == torch.float32 else self.factors
        for rows in _runs(part.rows, factors[0].shape[1]):
            own = part if rows == part.rows else Part(part.client, rows)
            for group, column in zip(self.members, factors, strict=True):
                for index in group:
                    if index in self.found:
                        self.found[index].add_weighted(index, column, into[index], own)


def _runs(rows: slice, every: int) -> Iterator[slice]:
    """Yield the rows in runs of at most `SUM_HEIGHT`."""
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
    """Return scale_i · clip(times · gradient_i) of n rows.

    Args:
        found: the gradients by parameter; parameters without one are absent.
        clip: bounds and scales of the rows.
        clients: K.
        times: of each gradient: n where `found` are gradients of a mean over the rows.
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


def lot_statistics(clip: ClipBounds, norms: Tensor, dropped: Tensor | None) -> LotStatistics:
    """Return what happened to the examples of a tile of one client.

    Args:
        clip: bounds and scales of the rows; rows of scale 0 are no examples.
        norms: by group, float64 (n, m), NaN for dropped rows.
        dropped: which rows were dropped (n,); None: none.
    """
    real = (clip.scales > 0).any(1)
    within = ((norms <= clip.bounds) & real.unsqueeze(1)).sum(0).tolist()
    lost = 0 if dropped is None else int((dropped & real).sum())
    return LotStatistics(int(real.sum()), lost, tuple(within))
