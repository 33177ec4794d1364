"""What one example may contribute, for every clipping."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    Groups,
    LayerClipping,
    PatternClipping,
)
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics, OneAtATime


class Net(nn.Module):
    """Layers with 8, 3, 3 and 4 values: encoder.fc (6 + 2), encoder.norm (2 + 1 unused), head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        self.head = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def parameters() -> FlatParameters:
    torch.manual_seed(0)
    return FlatParameters(Net())


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets.unsqueeze(1)) ** 2).sum(1)


NAMES = (
    "encoder.0.weight",
    "encoder.0.bias",
    "encoder.2.weight",
    "encoder.2.bias",
    "head.weight",
    "head.bias",
)


def named(groups: Groups) -> list[list[str]]:
    return [[NAMES[i] for i in members] for members in groups.members]


def test_flat_clipping_table() -> None:
    norms = torch.tensor([[0.0], [0.5], [2.0], [math.inf], [math.nan]], dtype=torch.float64)
    bound = torch.tensor([1.0], dtype=torch.float64)
    factors = FlatClipping(1.0).clip_factors(norms, bound).squeeze(1)
    expected = torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=2e-6, atol=0)
    assert factors[2] * 2.0 <= 1.0
    unbounded = FlatClipping(math.inf).clip_factors(norms, bound * math.inf).squeeze(1)
    assert unbounded.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_norm_that_is_not_finite_drops_the_example_in_all_groups() -> None:
    norms = torch.tensor([[0.0, 0.5], [math.nan, 0.1], [0.1, math.inf]], dtype=torch.float64)
    bounds = torch.tensor([1.0, 0.25], dtype=torch.float64)
    factors = LayerClipping(2.0, bounds=(1.0, 0.25)).clip_factors(norms, bounds)
    expected = torch.tensor([[1.0, 0.5], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=2e-6, atol=0)


def test_automatic_clipping_table() -> None:
    norms = torch.tensor([[0.0], [0.01], [1.0], [1e300], [math.inf], [math.nan]])
    norms = norms.double()
    norms[3] = 1e300
    bound = torch.tensor([2.0], dtype=torch.float64)
    factors = AutomaticClipping(2.0, gamma=0.01).clip_factors(norms, bound).squeeze(1)
    expected = torch.tensor([200.0, 100.0, 2.0 / 1.01, 2e-300, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("values", [(0.0, 0.01), (math.inf, 0.01), (1.0, 0.0), (1.0, math.nan)])
def test_automatic_clipping_needs_positive_numbers(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be > 0 and finite"):
        AutomaticClipping(*values)


CLIPPINGS: list[tuple[Clipping, int]] = [
    (FlatClipping(0.7), 1),
    (AutomaticClipping(0.7), 1),
    (AdaptiveClipping.flat(0.7, count_noise=2.0), 1),
    (LayerClipping(0.7), 3),
    (LayerClipping(0.7, bounds="by_dimension"), 3),
    (LayerClipping(0.7, bounds=(0.1, 0.2, 0.3)), 3),
    (PatternClipping(("*.bias", "*"), (0.7 * 0.6, 0.7 * 0.8)), 2),
]


@pytest.mark.parametrize(("clipping", "num_groups"), CLIPPINGS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_contribution_exceeds_its_bounds(
    clipping: Clipping, num_groups: int, data: st.DataObject
) -> None:
    groups = clipping.groups(parameters())
    assert len(groups.bounds) == num_groups
    assert groups.sensitivity <= 0.7 * (1 + 1e-12)
    size = st.floats(0, 1e300) | st.sampled_from([math.inf, math.nan, 5e-324])
    norms = data.draw(
        st.lists(st.lists(size, min_size=num_groups, max_size=num_groups), min_size=1, max_size=4)
    )
    norm = torch.tensor(norms, dtype=torch.float64)
    bounds = torch.tensor(groups.bounds, dtype=torch.float64)
    factors = clipping.clip_factors(norm, bounds)
    finite = torch.isfinite(norm).all(1)
    assert ((factors * norm)[finite] <= bounds).all()
    assert (factors[~finite] == 0).all()
    assert (factors >= 0).all()


@pytest.mark.parametrize(("clipping", "num_groups"), CLIPPINGS)
def test_groups_are_a_partition(clipping: Clipping, num_groups: int) -> None:
    flat = parameters()
    groups = clipping.groups(flat)
    assert sorted(i for members in groups.members for i in members) == list(range(6))
    assert sum(groups.dimensions) == flat.size == 15
    assert groups.dimensions == tuple(sum(flat.sizes[i] for i in m) for m in groups.members)


def test_a_layer_is_a_module_with_weight_and_bias() -> None:
    groups = LayerClipping(1.0).groups(parameters())
    assert named(groups) == [list(NAMES[:2]), list(NAMES[2:4]), list(NAMES[4:])]
    assert groups.dimensions == (8, 3, 4)
    assert groups.bounds == pytest.approx([1 / math.sqrt(3)] * 3)


def test_bounds_by_dimension() -> None:
    groups = LayerClipping(2.0, bounds="by_dimension").groups(parameters())
    assert groups.bounds == pytest.approx([2 * math.sqrt(d / 15) for d in (8, 3, 4)])
    assert groups.sensitivity == pytest.approx(2.0, rel=1e-14)


@pytest.mark.parametrize(
    ("clipping", "message"),
    [
        (LayerClipping(1.0, bounds=(0.5, 0.5)), "one for each of the 3 layers, got 2"),
        (LayerClipping(1.0, bounds=(0.9, 0.9, 0.1)), "sum of squares <= clip_norm"),
        (LayerClipping(1.0, bounds=(0.9, 0.1, 0.0)), "must be finite and > 0"),
    ],
)
def test_groups_that_do_not_fit_are_refused(clipping: Clipping, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipping.groups(parameters())


def test_without_a_bound_no_group_has_one() -> None:
    assert LayerClipping(math.inf).groups(parameters()).bounds == (math.inf,) * 3
    given_bounds = (1.0, math.inf, 2.0)
    assert LayerClipping(math.inf, bounds=given_bounds).groups(parameters()).bounds == given_bounds


@pytest.mark.parametrize(("clipping", "num_groups"), CLIPPINGS)
def test_a_sum_is_the_sum_of_gradients_clipped_by_hand(
    clipping: Clipping, num_groups: int, add_clipped_sum: Callable[..., BatchStatistics]
) -> None:
    torch.manual_seed(1)
    net = Net().double()
    x, y = torch.randn(6, 3, dtype=torch.float64) * 3, torch.randn(6, dtype=torch.float64)
    gradients = OneAtATime(net, loss)
    groups = clipping.groups(gradients.parameters)
    into = torch.zeros_like(gradients.parameters.data)
    add_clipped_sum(gradients, x, y, clipping, groups, into)
    places = gradients.parameters.slices(range(6))
    expected, clipped = torch.zeros_like(into), 0
    for i in range(6):
        value = loss(net(x[i : i + 1]), y[i : i + 1]).sum()
        parts = torch.autograd.grad(value, list(net.parameters()))
        for members, bound in zip(groups.members, groups.bounds, strict=True):
            norm = math.sqrt(sum(parts[m].square().sum().item() for m in members))
            factor = min(1.0, bound / norm)
            if isinstance(clipping, AutomaticClipping):
                factor = bound / (norm + clipping.gamma)
            clipped += factor < 1.0
            for m in members:
                expected[places[m]] += factor * parts[m].flatten()
    assert clipped > 0, "the test needs something to clip"
    torch.testing.assert_close(into, expected, rtol=0, atol=1e-5)
