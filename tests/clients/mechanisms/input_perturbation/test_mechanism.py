"""Input perturbation: noisy copies of bounded examples, one event, charged once."""

import math
from fractions import Fraction

import pytest
import torch

from fedsim.accountant import JointGaussian
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.mechanisms.bounded_examples import BoundedExamples
from fedsim.clients.mechanisms.input_perturbation import InputMechanism
from fedsim.noise.sources import DEVIATION, NoNoise, SeededNoise

R, Z = 2.0, 0.7


def mechanism_of(bounds: BoundedExamples) -> InputMechanism:
    return InputMechanism(Z).for_examples(bounds, torch.float64)


def test_the_first_round_is_charged_and_no_other() -> None:
    mechanism = mechanism_of(BoundedExamples("cross_entropy", 6, 3, R))
    parts = mechanism.part_multipliers
    assert mechanism.charges(0, 1) == [(JointGaussian(parts), 1)]
    assert mechanism.charges(0, 30) == [(JointGaussian(parts), 1)]
    assert mechanism.charges(1, 29) == []
    assert mechanism.charges(0, 0) == []
    assert group_noise_multiplier(parts) == pytest.approx(Z, rel=1e-5)
    assert group_noise_multiplier(parts) < Z


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_no_example_moves_the_integers_further_than_charged(scale: float) -> None:
    """Guarantee: zero-out moves features and target by at most 2²⁴ / z' each, computed exactly."""
    bounds = BoundedExamples("mse", 6, 2, R, 3.0)
    mechanism = mechanism_of(bounds)
    draw = torch.Generator().manual_seed(3)
    x = scale * torch.randn(50, 6, generator=draw, dtype=torch.float64)
    y = scale * torch.randn(50, 2, generator=draw, dtype=torch.float64)
    noisy = mechanism.release_examples(x, y, NoNoise())
    lengths = [math.sqrt(2.0) * Z * bound / DEVIATION for bound in (R, 3.0)]
    for rows, length, charged in zip(noisy, lengths, mechanism.part_multipliers, strict=True):
        for row in (rows / length).round().tolist():
            moved = sum(Fraction(int(value)) ** 2 for value in row)
            assert moved * Fraction(charged) ** 2 <= Fraction(2) ** 48


def test_an_example_changes_its_own_row_alone() -> None:
    mechanism = mechanism_of(BoundedExamples("cross_entropy", 4, 3, R))
    x, y = torch.randn(9, 2, 2), torch.randint(3, (9,))
    one, _ = mechanism.release_examples(x, y, SeededNoise(bytes(32)))
    x[4] = torch.nan
    other, _ = mechanism.release_examples(x, y, SeededNoise(bytes(32)))
    assert one.shape == x.shape
    assert one.dtype == x.dtype
    changed = (one != other).flatten(1).any(dim=1)
    assert changed.tolist() == [number == 4 for number in range(9)]
    assert bool(other.isfinite().all())


def test_noise_has_the_charged_deviation() -> None:
    mechanism = mechanism_of(BoundedExamples("mse", 50, 5, R, 3.0))
    x, y = torch.zeros(400, 50, dtype=torch.float64), torch.zeros(400, 5, dtype=torch.float64)
    features, targets = mechanism.release_examples(x, y, SeededNoise(bytes(32)))
    for rows, bound in ((features, R), (targets, 3.0)):
        deviation = math.sqrt(2.0) * Z * bound
        assert float(rows.std()) == pytest.approx(deviation, rel=5 * 0.5**0.5 / rows.numel() ** 0.5)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_noisy_labels_are_labels(loss: str) -> None:
    bounds = BoundedExamples(loss, 1, 3, R)  # pyright: ignore[reportArgumentType]
    x = torch.zeros(300, 1)
    y = torch.full((300,), 2) if loss == "cross_entropy" else torch.ones(300, 3)
    _, noisy = mechanism_of(bounds).release_examples(x, y, SeededNoise(bytes(32)))
    assert noisy.shape == y.shape
    assert noisy.dtype == y.dtype
    assert set(noisy.flatten().tolist()) <= {0, 1, 2}
    assert 0.4 < float((noisy == y).double().mean()) < 0.95
