"""Padded batches: an example's contribution depends on the parameters and on the example alone.

That is hypothesis (H) of every proof of DP-SGD. Floating point breaks it where a shape follows the
data: a matrix library takes other kernels, with other last bits, for other numbers of rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import FlatClipping, LayerClipping
from fedsim.clients.gradients import padded_batches
from fedsim.clients.gradients.layers.base import ExampleUse
from fedsim.clients.gradients.padded_batches import BatchReader, padded_rows
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import (
    BatchStatistics,
    ClipBounds,
    PaddedBatch,
    PerExampleLoss,
)
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.models.losses import cross_entropy

AddClippedSum = Callable[..., BatchStatistics]

C = 1.0


# --- Hypothesis (H) -------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)),
    )


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def narrow() -> nn.Module:
    """Layers with few outputs and rows that are not aligned, for which libraries have kernels."""
    return nn.Sequential(
        *(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 11)),
        *(nn.ReLU(), nn.Linear(11, 10)),
    )


def narrow_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3, stride=2), nn.GroupNorm(1, 5)),
        *(nn.ReLU(), nn.Conv2d(5, 3, 3, padding=1), nn.Flatten(), nn.Linear(27, 10)),
    )


def many_channels() -> nn.Module:
    """A client's convolutions of 32 channels and more are torch's own."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 40, 3), nn.ReLU(), nn.Conv2d(40, 8, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(72, 10)),
    )


class Sequences(nn.Module):
    """Linear layers on sequences, with norms of held gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.two(torch.relu(self.one(x)))).mean(1))


class Words(nn.Module):
    """A table, a cell over time, and uses that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.table(x))[0].mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "cnn": (cnn, (1, 28, 28)),
    "norms": (normed, (1, 16, 16)),
    "small": (small, (64,)),
    "narrow": (narrow, (9,)),
    "narrow cnn": (narrow_cnn, (1, 9, 9)),
    "many channels": (many_channels, (1, 12, 12)),
    "sequences": (Sequences, (3, 5)),
    "words": (Words, (6,)),
}


def examples(shape: tuple[int, ...], n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=generator)
    if shape == (6,):
        return torch.randint(0, 20, (n, *shape), generator=generator), y
    return torch.randn(n, *shape, generator=generator), y


@dataclass(frozen=True)
class Company:
    """What else is in a padded batch of R rows a client: all that must not matter."""

    place: int  # of the row that is watched
    real: int  # examples of its client
    others: int  # seed of all other rows of the client
    neighbours: int  # seed of the other clients' rows
    scale: float = 1.0  # of all other rows


def contribution(
    gradients: RuleGradients,
    values: Tensor,
    row: tuple[Tensor, Tensor],
    company: Company,
    *,
    rows: int,
    client: int,
) -> tuple[Tensor, Tensor]:
    """Return the norms (m,) of one row of one client, and what it adds to the sum (size,)."""
    clients, shape = len(values), tuple(row[0].shape)
    x, y = examples(shape, clients * rows, company.neighbours)
    own_x, own_y = examples(shape, rows, company.others)
    if x.is_floating_point():
        x, own_x = x * company.scale, own_x * company.scale
    own_x[company.real :], own_y[company.real :] = 0, 0
    own_x[company.place], own_y[company.place] = row
    mine = slice(client * rows, (client + 1) * rows)
    x[mine], y[mine] = own_x, own_y
    weights = torch.ones(clients * rows)
    weights[mine][company.real :] = 0
    at = client * rows + company.place
    clipping = LayerClipping(C)
    groups = clipping.groups(gradients.parameters)
    bounds = torch.tensor([groups.bounds], dtype=torch.float64).expand(len(x), -1)
    scales = torch.zeros(len(x), 1, dtype=torch.float64)
    scales[at] = 0.1
    into = torch.zeros_like(values, dtype=torch.float64)
    clip = ClipBounds(clipping, groups.members, bounds, scales)
    added = gradients.clipped(values, PaddedBatch(clients, x, y, weights), clip)
    added.add_to(gradients.parameters.stacked_views(into))
    assert not into[[k for k in range(clients) if k != client]].any()
    return added.norms[at], into[client]


def stacked_values(parameters: FlatParameters, clients: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(clients, parameters.size, generator=generator)
    return parameters.data + 0.02 * noise


@pytest.mark.parametrize(("clients", "rows"), [(1, 8), (1, 40), (3, 24)])
@pytest.mark.parametrize("name", MODELS)
def test_no_other_row_and_no_place_changes_a_bit_of_a_contribution(
    name: str, clients: int, rows: int
) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    gradients = RuleGradients(make(), cross_entropy)
    values, client = stacked_values(gradients.parameters, clients), clients - 1
    x, y = examples(shape, 1, 99)
    base = Company(0, rows, 1, 2)
    expected = contribution(gradients, values, (x[0], y[0]), base, rows=rows, client=client)
    assert expected[1].any()
    variants = [
        *(replace(base, place=place) for place in (1, 2, 3, 5, rows // 2 + 1, rows - 1)),
        *(replace(base, others=3), replace(base, others=4, scale=1e4), replace(base, scale=0.0)),
        *(replace(base, scale=torch.inf), replace(base, scale=torch.nan)),
        *(replace(base, real=real) for real in (1, rows // 2, rows - 1)),
        *(replace(base, neighbours=6), replace(base, neighbours=7, scale=1e-6)),
    ]
    for company in variants:
        found = contribution(gradients, values, (x[0], y[0]), company, rows=rows, client=client)
        assert torch.equal(found[0], expected[0]), company
        assert torch.equal(found[1], expected[1]), company


# --- The attack on a sum without padded batches ----------------------------------------

BATCH = 16
ONE_STEP = LocalSettings(steps=1, batch_size=BATCH)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum(1)


def kinked() -> tuple[nn.Sequential, Tensor, Tensor]:
    """One hidden unit at a time carries the whole gradient, if its last bit is above zero."""
    torch.manual_seed(0)
    x = torch.randn(784)
    first, last = nn.Linear(784, 128), nn.Linear(128, 1)
    model = nn.Sequential(first, nn.ReLU(), last)
    with torch.no_grad():
        last.weight.fill_(1.0)
        last.bias.zero_()
        first.bias.zero_()
    return model, x.expand(2 * BATCH, 784).contiguous(), torch.full((2 * BATCH, 1), 50.0)


def crafted_biases(weight: Tensor, x: Tensor, n: int) -> list[tuple[int, float]]:
    """Return units and biases for which a unit is on with n rows and off with n − 1, or so."""
    with torch.no_grad():
        many, fewer = (x[:rows] @ weight.t() for rows in (n, n - 1))
        found = []
        for unit in (many[0] != fewer[0]).nonzero().flatten().tolist():
            found += [(unit, -many[0, unit].item()), (unit, -fewer[0, unit].item())]
        return found


def moved_by_one(
    sums: Callable[[int], Tensor], model: nn.Sequential, x: Tensor, n: int
) -> tuple[float, int]:
    """Return how far n equal examples are from n − 1, at worst over crafted parameters."""
    first: Any = model[0]
    worst, tried = 0.0, crafted_biases(first.weight, x, n)[:24]
    with torch.no_grad():
        for unit, bias in tried:
            first.bias.fill_(-1e3)
            for step in (-1, 0, 1):
                first.bias[unit] = bias + step * 2.0**-25
                distance = (sums(n) - sums(n - 1)).double().norm().item()
                worst = max(worst, distance)
    return worst, len(tried)


def test_an_example_moves_a_sum_by_no_more_than_its_bound_even_at_a_kink(
    add_clipped_sum: AddClippedSum,
) -> None:
    """Parameters at which removing one of 16 equal examples changes the bits of all others."""
    model, x, y = kinked()
    gradients, clipping = RuleGradients(model, squared_error), FlatClipping(C)
    groups = clipping.groups(gradients.parameters)
    step = DpSgdMechanism(PoissonSampling(1.0), clipping, 0.0, float(BATCH))

    def by_padded_batches(n: int) -> Tensor:
        releases = []
        shared = SharedModel(model, parameters=gradients.parameters)
        member = BlockMember(x[:n], y[:n], StreamKey(0, 0, 1), range(1), step)
        block_of(
            *(shared, squared_error, gradients, ONE_STEP, [member]),
        ).train(lambda batches, released, used: releases.append(released[0] * BATCH))
        shared.restart()
        return releases[0]

    def unpadded(n: int) -> Tensor:
        into = torch.zeros_like(gradients.parameters.data, dtype=torch.float64)
        add_clipped_sum(gradients, x[:n], y[:n], clipping, groups, into)
        return into

    sizes = (BATCH, 6, 2)
    for n in sizes:
        assert moved_by_one(by_padded_batches, model, x, n)[0] <= C * (1 + 1e-5)
    worst = [moved_by_one(unpadded, model, x, n) for n in sizes]
    if not any(tried for _, tried in worst):
        pytest.skip("this machine's library rounds alike for 1 to 16 rows, so nothing can move")
    assert max(distance for distance, _ in worst) > 1.5 * C, (
        "the attack must work without padded batches"
    )


# --- Padded batches ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "most", "rows"),
    [
        *((1, None, 8), (8, None, 8), (9, None, 16), (0, None, 8), (46, None, 48)),
        *((46, 48, 48), (46, 47, 24), (46, 20, 16), (46, 8, 8), (46, 7, 1), (46, 1, 1)),
        (100, 60, 56),
    ],
)
def test_rows_are_a_multiple_of_eight_or_one(batch: int, most: int | None, rows: int) -> None:
    assert padded_rows(batch, most) == rows


def cut(
    data: Sequence[tuple[Tensor, Tensor] | None], rows: int, batches: Sequence[np.ndarray | None]
) -> list[PaddedBatch]:
    """The padded batches of batches, copied: a padded batch's memory may be used again."""
    reader = BatchReader(data, rows, dtype=torch.float32)
    return [
        PaddedBatch(t.clients, t.features.clone(), t.targets.clone(), t.weights)
        for t in reader.padded_batches(batches)
    ]


@pytest.mark.parametrize("small", [True, False])
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_tiles_have_every_example_of_a_batch_once_and_zeros_elsewhere(
    small: bool, data: st.DataObject
) -> None:
    """Of one client and of several, absent ones included; from one pool or gathered by client."""
    rows = data.draw(st.integers(1, 9), "rows")
    sizes = data.draw(st.lists(st.integers(0, 20) | st.none(), min_size=1, max_size=4), "sizes")
    if all(size is None for size in sizes):
        sizes = [3]
    clients: list[tuple[Tensor, Tensor] | None] = []
    batches: list[np.ndarray | None] = []
    for k, size in enumerate(sizes):
        if size is None:
            clients.append(None)
            batches.append(None)
            continue
        x = 1.0 + 100 * k + torch.arange(size).view(-1, 1).expand(-1, 2)
        clients.append((x, 1 + 100 * k + torch.arange(size)))
        taken = data.draw(st.lists(st.booleans(), min_size=size, max_size=size), f"batch {k}")
        resting = data.draw(st.booleans(), f"client {k} has no batch")
        batches.append(None if resting else np.flatnonzero(taken))
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr(padded_batches, "_SMALL_BYTES", -1)
        found = cut(clients, rows, batches)
    longest = max((len(batch) for batch in batches if batch is not None), default=0)
    assert len(found) == -(-longest // rows)
    for padded in found:
        assert padded.clients == len(sizes)
        assert padded.features.shape == (len(sizes) * rows, 2)
        assert torch.equal(padded.weights > 0, padded.targets > 0)
        assert torch.equal(padded.features, padded.targets.unsqueeze(1).expand(-1, 2).float())
    for k, batch in enumerate(batches):
        own = [padded.targets[k * rows : (k + 1) * rows] for padded in found]
        seen = torch.cat(own).tolist() if own else []
        wanted = [] if batch is None else (1 + 100 * k + batch).tolist()
        assert [value for value in seen if value] == wanted


# --- Mutations: each is caught by the check that is about it --------------------------------------


def batch_of(n: int, rows: int | None) -> tuple[PaddedBatch, Tensor, Tensor]:
    """One client's batch of n examples in a padded batch of R rows; None: n rows."""
    x, y = examples((64,), n, 8)
    y = y.clamp(min=1)  # a row that is no example has target 0
    (padded,) = cut([(x, y)], rows or n, [np.arange(n)])
    return padded, x, y


def check_shape(rows: int | None) -> None:
    """A padded batch's shape does not tell how many examples there are."""
    assert len({len(batch_of(n, rows)[0].features) for n in (3, 7, 8)}) == 1


def check_padding(
    gradients: RuleGradients,
    scales: Callable[[PaddedBatch], Tensor],
    add_clipped_sum: AddClippedSum,
) -> None:
    """Rows that are no examples add nothing: a biased model has a gradient at zeros, too."""
    padded, x, y = batch_of(5, 8)
    clipping = FlatClipping(0.5)
    groups = clipping.groups(gradients.parameters)
    bounds = torch.full((8, 1), 0.5, dtype=torch.float64)
    values = gradients.parameters.data.unsqueeze(0)
    into = torch.zeros_like(values, dtype=torch.float64)
    expected = torch.zeros_like(into[0])
    clip = ClipBounds(clipping, groups.members, bounds, scales(padded))
    gradients.clipped(values, padded, clip).add_to(gradients.parameters.stacked_views(into))
    add_clipped_sum(gradients, x, y, clipping, groups, expected)
    torch.testing.assert_close(into[0], expected, rtol=1e-4, atol=1e-6)


def weighted(padded: PaddedBatch) -> Tensor:
    return padded.weights.double().unsqueeze(1)


def squared_scores(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum(1)


class WeightsOfOne(RuleGradients):
    """Forgets the weights of the rows' losses."""

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        return super().row_gradients(
            values, replace(padded, weights=torch.ones_like(padded.weights))
        )


def test_mutation_a_tile_that_follows_the_batch_is_caught() -> None:
    check_shape(8)
    with pytest.raises(AssertionError):
        check_shape(None)


@pytest.mark.parametrize("loss", [cross_entropy, squared_scores])
def test_mutation_factors_without_the_weights_of_rows_are_caught(
    loss: PerExampleLoss, add_clipped_sum: AddClippedSum
) -> None:
    torch.manual_seed(0)
    check_padding(RuleGradients(small(), loss), weighted, add_clipped_sum)
    # Clipped to nothing all the same:
    check_padding(WeightsOfOne(small(), loss), weighted, add_clipped_sum)
    with pytest.raises(AssertionError):
        check_padding(
            WeightsOfOne(small(), loss), lambda padded: torch.ones(8, 1).double(), add_clipped_sum
        )


def check_dropped(kind: type[RuleGradients], add_clipped_sum: AddClippedSum) -> None:
    """An example that is not finite adds nothing and spoils nothing."""
    torch.manual_seed(0)
    gradients = kind(small(), cross_entropy)
    clipping = FlatClipping(0.5)
    groups = clipping.groups(gradients.parameters)
    x, y = examples((64,), 6, 8)
    like = gradients.parameters.data
    sums = [torch.zeros_like(like, dtype=torch.float64) for _ in range(2)]
    add_clipped_sum(gradients, x[1:], y[1:], clipping, groups, sums[0])
    x[0, 3] = torch.nan
    statistics = add_clipped_sum(gradients, x, y, clipping, groups, sums[1])
    assert statistics.not_finite == 1
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-6)


class KeepsDropped(RuleGradients):
    """Its rows stay as they are when they are dropped; 0 · NaN is NaN."""

    def row_gradients(self, values: Tensor, padded: PaddedBatch) -> Mapping[int, ExampleUse]:
        found = super().row_gradients(values, padded)
        for use in found.values():
            use.drop = lambda dropped: None
        return found


def test_mutation_a_sum_that_ignores_dropped_rows_is_caught(add_clipped_sum: AddClippedSum) -> None:
    check_dropped(RuleGradients, add_clipped_sum)
    with pytest.raises(AssertionError):
        check_dropped(KeepsDropped, add_clipped_sum)


class Unit(nn.Module):
    """Has no value at zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


def relative(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss without a value at the target of a row that is no example."""
    return ((outputs[:, 0] - targets) / targets) ** 2


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: nn.Sequential(Unit(), nn.Linear(64, 10)), cross_entropy),
        (lambda: nn.Sequential(nn.Linear(64, 10), Unit(), nn.Linear(10, 10)), relative),
        (lambda: nn.Sequential(nn.Linear(64, 10), nn.LayerNorm(10)), relative),
    ],
)
def test_rows_that_have_no_value_at_zeros_add_nothing(
    make: Callable[[], nn.Module], loss: PerExampleLoss, add_clipped_sum: AddClippedSum
) -> None:
    """With and without privacy."""
    torch.manual_seed(0)
    gradients = RuleGradients(make(), loss)
    check_padding(gradients, weighted, add_clipped_sum)
    padded, x, y = batch_of(5, 8)
    values = gradients.parameters.data.unsqueeze(0)
    sums = [torch.zeros_like(values) for _ in range(2)]
    gradients.add_sums(values, padded, sums[0])
    gradients.add_sums(values, PaddedBatch(1, x, y, torch.ones(5)), sums[1])
    assert torch.isfinite(sums[0]).all()
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)
