"""Rényi orders of one's own: one choice for calibration, filter, fleet, ledger and plan."""

from typing import Any

import pytest
from pydantic import ValidationError

from fedsim.accountant import (
    FleetAccountant,
    Gaussian,
    PoissonSampled,
    PrivacyFilter,
    PrivacyLedger,
    RdpAccountant,
    calibrate_noise_multiplier,
    calibrate_steps,
    make_accountant,
)
from fedsim.accountant.accountants import RdpOrders, choose_accountant, renyi_choice
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyBudgetError, PrivacyPlanError
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings

STEP, DELTA = PoissonSampled(0.05, Gaussian(1.1)), 1e-5
ORDERS = (2.0, 8.0, 32.0)
CHOICE = RdpOrders(ORDERS)
LOCAL = LocalSettings(steps=2, batch_size=32)


def epsilon(count: int, orders: tuple[float, ...] = ORDERS) -> float:
    return RdpAccountant(orders).compose(STEP, count).get_epsilon(DELTA)


def at(*orders: float) -> dict[str, Any]:
    return {"name": "rdp", "orders": [*orders]}


def settings(**changes: Any) -> PrivacySettings:
    given = {"delta": 1e-3, "max_grad_norm": 0.5, "accountant": "rdp", **changes}
    return PrivacySettings(**given)


def test_every_account_of_a_choice_has_its_orders() -> None:
    expected = epsilon(300)
    assert make_accountant(CHOICE).compose(STEP, 300).get_epsilon(DELTA) == expected
    assert expected > RdpAccountant().compose(STEP, 300).get_epsilon(DELTA) * 1.01
    ledger = PrivacyLedger()
    ledger.record(STEP, 300)
    assert ledger.epsilon(DELTA, CHOICE) == expected
    fleet = FleetAccountant(CHOICE).compose("a", STEP, 300)
    assert fleet.get_epsilon(DELTA)["a"] == pytest.approx(expected, rel=1e-12)


def test_calibration_and_filter_never_exceed_the_target_at_these_orders() -> None:
    noise = calibrate_noise_multiplier(
        target_epsilon=3.0, delta=DELTA, sampling_rate=0.05, steps=200, accountant=CHOICE
    )
    spent = RdpAccountant(ORDERS).compose(PoissonSampled(0.05, Gaussian(noise)), 200)
    assert 2.99 < spent.get_epsilon(DELTA) <= 3.0
    steps = calibrate_steps(
        target_epsilon=4.0, delta=DELTA, sampling_rate=0.05, noise_multiplier=1.1, accountant=CHOICE
    )
    assert epsilon(steps) <= 4.0 < epsilon(steps + 1)
    assert PrivacyFilter(4.0, DELTA, accountant=CHOICE).max_count(STEP) == steps
    adaptive = PrivacyFilter(4.0, DELTA, mode="adaptive", accountant=CHOICE)
    assert adaptive.order in ORDERS


def test_plans_use_the_orders_and_say_when_they_are_too_few() -> None:
    def noise(**changes: Any) -> float:
        plan = plan_privacy(
            PlanRequest(settings(**changes), LOCAL, examples=400, planned_rounds=20)
        )
        return plan.noise_multiplier

    assert noise(target_epsilon=2.0, accountant=at(4.0)) > noise(target_epsilon=2.0) * 1.05
    with pytest.raises((PrivacyBudgetError, PrivacyPlanError), match=r"largest of .*orders is 2"):
        noise(target_epsilon=2.0, delta=1e-9, accountant=at(1.5, 2.0))


@pytest.mark.parametrize(
    ("accountant", "message"),
    [
        (at(1.0, 2.0), "greater than 1"),
        (at(), "at least 1 item"),
        (at(1e9), "less than or equal to 65536"),
        ({"name": "pld", "orders": [4.0]}, "not permitted"),
        ({"name": "moments", "orders": [4.0]}, "not permitted"),
    ],
)
def test_wrong_orders_are_refused(accountant: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(noise_multiplier=1.0, accountant=accountant)


def test_only_the_renyi_accountant_has_orders() -> None:
    assert choose_accountant("pld") == "pld"
    assert choose_accountant("rdp", [2, 8, 32]) == CHOICE
    assert (renyi_choice(CHOICE), renyi_choice("pld")) == (CHOICE, "rdp")
    with pytest.raises(ValueError, match="orders belong to accountant rdp"):
        choose_accountant("moments", [2.0])
    with pytest.raises(ValueError, match="1"):
        RdpOrders((1.0,))
