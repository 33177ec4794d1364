"""The cost of selection against dp-accounting and the formulas' own limits."""

import math

import numpy as np
import pytest
from dp_accounting import PoissonSampledDpEvent, SelfComposedDpEvent, dp_event
from dp_accounting.rdp import RdpAccountant as OracleAccountant

from fedsim.accountant import Gaussian, PoissonSampled, RdpAccountant, RepeatAndSelect, SelfComposed
from fedsim.accountant.rdp.selection import log_inverse_gamma, rdp_repeat_and_select

ORDERS = tuple(float(order) for order in range(2, 65))


@pytest.mark.parametrize(
    ("mean", "shape"),
    [(10.0, 1.0), (10.0, 0.0), (3.0, 0.5), (100.0, 2.0), (1.5, 1.0), (10.0, None), (1.0, None)],
)
def test_equals_dp_accounting(mean: float, shape: float | None) -> None:
    # At integer orders, where its curve of one run is exact.
    ours = RdpAccountant(ORDERS)
    run = SelfComposed(PoissonSampled(0.01, Gaussian(1.0)), 1000)
    ours.compose(RepeatAndSelect(run, mean, shape), 2)
    theirs = OracleAccountant(orders=list(ORDERS))
    step = PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0))
    runs = SelfComposedDpEvent(step, 1000)
    theirs.compose(
        dp_event.RepeatAndSelectDpEvent(runs, mean, math.inf if shape is None else shape), 2
    )
    values = np.array([value for _, value in ours.rdp()])
    if shape is None:  # it does not use that a bound at one order is one at all smaller orders
        expected = np.minimum.accumulate(np.array(theirs.rdp)[::-1])[::-1]
    else:
        expected = np.array(theirs.rdp)
    assert values == pytest.approx(expected, rel=1e-9 if shape in (0.5, 0.0, 2.0) else 1e-10)


@pytest.mark.parametrize("shape", [0.0, 1e-12, 0.3, 1.0, 2.5, 1e3])
@pytest.mark.parametrize("mean", [1.0, 1.0 + 1e-9, 2.0, 1e4])
def test_gamma_belongs_to_the_mean(mean: float, shape: float) -> None:
    y = log_inverse_gamma(mean, shape)
    if mean == 1.0:
        assert y == 0.0
        return
    w = shape * y
    factor = w / -math.expm1(-w) if w > 0.0 else 1.0
    assert factor * math.expm1(y) / y == pytest.approx(mean, rel=1e-10)
    if shape == 1.0:
        assert y == pytest.approx(math.log(mean), rel=1e-6)


def test_no_order_has_less_than_a_smaller_one() -> None:
    rdp = np.array(ORDERS) / 8.0
    for shape in (None, 0.0, 1.0):
        values = rdp_repeat_and_select(ORDERS, rdp, 10.0, shape)
        assert np.all(np.diff(values) >= 0.0)
        assert np.all(values > rdp)
        shuffled = rdp_repeat_and_select(ORDERS[::-1], rdp[::-1], 10.0, shape)
        assert np.array_equal(shuffled[::-1], values)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="mean must be finite and >= 1"):
        rdp_repeat_and_select((2.0,), np.ones(1), 0.5, 1.0)
    with pytest.raises(ValueError, match="shape must be finite and >= 0"):
        rdp_repeat_and_select((2.0,), np.ones(1), 2.0, -1.0)
