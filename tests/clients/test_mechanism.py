"""The guarantee of one DP-SGD step, on data, on noise and on neighbouring data sets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fedsim.accountant import Gaussian, PoissonSampled
from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.noise import SeededNoise
from fedsim.clients.dp_sgd.per_example import (
    LoopGradients,
    PerExampleGradients,
    VmapGradients,
    gradients_for,
)
from fedsim.clients.dp_sgd.sampling import PoissonSampling

BACKENDS = [VmapGradients, LoopGradients]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def linear_score(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.squeeze(1)


def dirac(size: int) -> nn.Module:
    """A model whose per-example gradient is the example itself, whatever its weights."""
    return nn.Linear(size, 1, bias=False)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1)
    ).double()


def plain_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = squared(model(x), y).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_clipping_the_sum_is_the_plain_gradient(backend: type[PerExampleGradients]) -> None:
    model = random_net()
    x, y = torch.randn(7, 1, 4, 4, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    total = backend(model, squared).clipped_sum(x, y, FlatClipping(float("inf")))
    torch.testing.assert_close(total, plain_gradient(model, x, y), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipped_sum_is_the_sum_of_clipped_gradients(backend: type[PerExampleGradients]) -> None:
    model = random_net()
    x, y = torch.randn(7, 1, 4, 4, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    total = backend(model, squared).clipped_sum(x, y, FlatClipping(5.0))
    expected = torch.zeros_like(total)
    norms = []
    for i in range(7):
        gradient = plain_gradient(model, x[i : i + 1], y[i : i + 1])
        norms.append(gradient.norm().item())
        expected += gradient * min(1.0, 5.0 / gradient.norm().item())
    assert min(norms) < 5.0 < max(norms), "the test needs clipped and unclipped examples"
    torch.testing.assert_close(total, expected, rtol=0, atol=7 * 5.0 * 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(-1, 1), st.floats(-1, 1), st.sampled_from([1e-30, 1e-20, 1e-3, 1.0, 1e20])
        ),
        min_size=1,
        max_size=5,
    ),
    st.floats(1e-3, 1e3),
)
def test_one_example_changes_the_sum_by_at_most_c(
    backend: type[PerExampleGradients], rows: list, bound: float
) -> None:
    x = torch.tensor([[a * s, b * s] for a, b, s in rows], dtype=torch.float32)
    y = torch.zeros(len(rows))
    gradients = backend(dirac(2), linear_score)
    alone = gradients.clipped_sum(x[:1], y[:1], FlatClipping(bound)).double()
    assert alone.norm().item() <= bound
    with_it = gradients.clipped_sum(x, y, FlatClipping(bound)).double()
    without = gradients.clipped_sum(x[1:], y[1:], FlatClipping(bound)).double()
    rounding = 1e-6 * bound * len(rows)
    assert (with_it - without).norm().item() <= bound + rounding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_an_example_without_a_finite_gradient_contributes_nothing(
    backend: type[PerExampleGradients], poison: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x, y = torch.randn(4, 2), torch.randn(4)
    gradients = backend(model, squared)
    clean = gradients.clipped_sum(x[1:], y[1:], FlatClipping(1.0))
    targets = y.clone()
    targets[0] = poison
    dirty = gradients.clipped_sum(x, targets, FlatClipping(1.0))
    assert torch.isfinite(dirty).all()
    if not np.isfinite(poison) or poison > 1e38:
        torch.testing.assert_close(dirty, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_lot_gives_a_zero_sum(backend: type[PerExampleGradients]) -> None:
    total = backend(dirac(3), linear_score).clipped_sum(
        torch.empty(0, 3), torch.empty(0), FlatClipping(1.0)
    )
    torch.testing.assert_close(total, torch.zeros(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_and_frozen_parameters(backend: type[PerExampleGradients]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 1)
            self.unused = nn.Linear(2, 1)
            self.used.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    gradients = backend(Net(), linear_score)
    assert list(gradients.parameters) == ["used.weight", "unused.weight", "unused.bias"]
    total = gradients.clipped_sum(torch.ones(2, 2), torch.zeros(2), FlatClipping(10.0))
    torch.testing.assert_close(total, torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0]))


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))).sum(1, keepdim=True)

    torch.manual_seed(0)
    model = Tied().double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    sums = [backend(model, squared).clipped_sum(x, y, FlatClipping(0.4)) for backend in BACKENDS]
    assert sums[0].shape == (4,)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-10, atol=1e-12)


def test_a_model_that_cannot_be_vectorised_falls_back_to_the_loop() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() >= 0 else -self.layer(x)

    model = Branching()
    x, y = torch.randn(3, 2), torch.randn(3)
    assert isinstance(gradients_for(model, squared, x, y), LoopGradients)
    assert isinstance(gradients_for(dirac(2), squared, x, y), VmapGradients)


def test_a_loss_that_couples_examples_cannot_couple_them_here() -> None:
    def batch_mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) - outputs.mean()) ** 2 + outputs.squeeze(1)

    gradients = VmapGradients(dirac(2), batch_mean)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    alone = gradients.clipped_sum(x[:1], torch.zeros(1), FlatClipping(10.0))
    other = gradients.clipped_sum(x[1:], torch.zeros(1), FlatClipping(10.0))
    both = gradients.clipped_sum(x, torch.zeros(2), FlatClipping(10.0))
    torch.testing.assert_close(both, alone + other)


def released(
    step: DpSgdStep, x: Tensor, *, seed: int = 0, dimension: int = 3
) -> tuple[Tensor, np.random.Generator]:
    lots = generator(seed)
    gradient = step.gradient(
        VmapGradients(dirac(dimension), linear_score),
        x,
        torch.zeros(len(x)),
        lots=lots,
        noise=SeededNoise(generator(seed + 1)),
    )
    return gradient, lots


SIZE = 200_000


def deviations(multiplier: float = 1.0) -> float:
    """Standard deviation of the released noise in units of the promised one."""
    step = DpSgdStep(1.0, 1.3 * multiplier, 0.5, 8.0)
    gradient, _ = released(step, torch.zeros(4, SIZE), dimension=SIZE)
    return (gradient * 8.0).std().item() / (1.3 * 0.5)


def test_noise_has_the_promised_deviation_and_shape() -> None:
    # Four standard errors of a standard deviation: false-alarm rate 6e-5; and the seed is fixed.
    tolerance = 4 / np.sqrt(2 * SIZE)
    assert abs(deviations() - 1) < tolerance
    assert abs(deviations(1.03) - 1) > tolerance, "the test must reject slightly wrong noise"
    assert abs(deviations(0.97) - 1) > tolerance
    step = DpSgdStep(1.0, 1.3, 0.5, 8.0)
    gradient, _ = released(step, torch.zeros(4, SIZE), dimension=SIZE)
    assert stats.kstest(gradient.numpy() * 8.0 / 0.65, "norm").pvalue > 1e-4


def test_noise_is_added_once_whatever_the_lot() -> None:
    step = DpSgdStep(1.0, 1.0, 1.0, 8.0)
    small, _ = released(step, torch.zeros(1, 3))
    large, _ = released(step, torch.zeros(500, 3))
    empty, _ = released(step, torch.zeros(0, 3))
    torch.testing.assert_close(small, large)
    torch.testing.assert_close(small, empty)


def test_neighbours_share_noise_normaliser_and_event() -> None:
    """N and N + 1 examples with the same public settings: only the clipped sum differs."""
    step = DpSgdStep(1.0, 2.0, 1.0, 10.0)
    x = torch.eye(3)
    more = torch.cat([x, torch.tensor([[0.0, 0.0, 9.0]])])
    fewer, _ = released(step, x)
    extended, _ = released(step, more)
    difference = (extended - fewer) * 10.0
    torch.testing.assert_close(difference, torch.tensor([0.0, 0.0, 1.0]), rtol=1e-5, atol=1e-5)


def test_a_step_is_the_event_that_is_charged() -> None:
    step = DpSgdStep(0.2, 1.1, 0.5, 10.0)
    assert step.event == PoissonSampled(0.2, Gaussian(1.1))
    assert step.standard_deviation == pytest.approx(0.55)
    assert DpSgdStep(1.0, 0.0, float("inf"), 1.0).standard_deviation == 0.0


def test_poisson_sampling_is_independent_inclusion() -> None:
    # Sizes are Binomial(N, q), every example is as likely, pairs are uncorrelated.
    # False-alarm rate below 1e-4 for each of the three tests; the seed is fixed.
    lots, count, rate, steps = generator(5), 40, 0.15, 8000
    included = np.zeros((steps, count))
    for row in included:
        row[PoissonSampling(rate).lot(count, lots)] = 1
    sizes = included.sum(1)
    bins = np.arange(2, 11)
    observed = [np.sum(sizes < 2), *(np.sum(sizes == b) for b in bins), np.sum(sizes > 10)]
    expected = np.array(
        [
            stats.binom.cdf(1, count, rate),
            *stats.binom.pmf(bins, count, rate),
            stats.binom.sf(10, count, rate),
        ]
    )
    assert stats.chisquare(observed, expected * steps).pvalue > 1e-4
    assert stats.chisquare(included.sum(0)).pvalue > 1e-4
    correlation = np.asarray(np.corrcoef(included.T))[np.triu_indices(count, 1)]
    assert np.abs(correlation).max() < 5.5 / np.sqrt(steps)
    successive = np.asarray(np.corrcoef(included[:-1].ravel(), included[1:].ravel()))
    assert abs(successive[0, 1]) < 5 / np.sqrt(steps * count)


def test_lots_are_empty_as_often_as_they_should_be() -> None:
    # P(empty) = 0.9^5 = 0.59; 4.5 standard errors.
    lots = generator(6)
    empty = np.mean([len(PoissonSampling(0.1).lot(5, lots)) == 0 for _ in range(5000)])
    assert abs(empty - 0.9**5) < 4.5 * np.sqrt(0.59 * 0.41 / 5000)


def test_clipping_table() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0, float("inf"), float("nan")], dtype=torch.float64)
    clipped = FlatClipping(1.0).coefficients(norms)
    torch.testing.assert_close(
        clipped, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64), rtol=2e-6, atol=0
    )
    assert (clipped[2] * 2.0) <= 1.0
    unbounded = FlatClipping(float("inf")).coefficients(norms)
    torch.testing.assert_close(
        unbounded, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    )
