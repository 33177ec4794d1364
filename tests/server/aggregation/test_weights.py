"""Weights of clients: n^a / z^b from plan values, as whole numbers, with a largest share."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.server.aggregation.weights import (
    WEIGHT_UNITS,
    ClientWeights,
    PlanValues,
    WeightingError,
    plan_weights,
)
from fedsim.server.settings import FederationSettings, WeightingSettings

CLIENTS = [PlanValues(100, 2.0), PlanValues(50, 0.5), PlanValues(200, 8.0), PlanValues(0, 1.0)]


def weights(*, clients: int = 3, units: int = WEIGHT_UNITS, **keys: object) -> ClientWeights:
    weighting = WeightingSettings.model_validate(keys)
    return plan_weights(weighting, CLIENTS, clients_per_round=clients, units=units)


def test_weights_by_examples_are_the_numbers_themselves() -> None:
    assert weights(name="examples").values == (100, 50, 200, 0)
    assert weights(name="uniform").values == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("powers", "expected"),
    [
        ({}, (50.0, 100.0, 25.0)),
        ({"noise_power": 2.0}, (25.0, 200.0, 3.125)),
        ({"size_power": 2.0}, (5000.0, 5000.0, 5000.0)),
        ({"size_power": 0.0}, (0.5, 2.0, 0.125)),
        ({"noise_power": 0.0}, (100.0, 50.0, 200.0)),
    ],
)
def test_weights_by_noise_are_powers_in_units_of_the_heaviest(
    powers: dict[str, Any], expected: tuple[float, ...]
) -> None:
    found = weights(name="examples_over_noise", **powers).values
    heaviest = max(expected)
    assert found[:3] == tuple(round(value / heaviest * WEIGHT_UNITS) for value in expected)
    assert found[3] == 0, "no examples, no weight"


def test_fewer_units_are_a_coarser_rounding_that_drops_nobody() -> None:
    assert weights(name="examples_over_noise", noise_power=2.0, units=10).values == (1, 10, 1, 0)


def test_a_client_without_noise_beside_others_is_refused() -> None:
    weighting = WeightingSettings(name="examples_over_noise")
    mixed = [PlanValues(10, 1.0), PlanValues(10, 0.0)]
    with pytest.raises(WeightingError, match="client 1, which adds no noise while others do"):
        plan_weights(weighting, mixed, clients_per_round=2)
    silent = [PlanValues(10, 0.0), PlanValues(5, 0.0)]
    found = plan_weights(weighting, silent, clients_per_round=2).values
    assert found == (WEIGHT_UNITS, WEIGHT_UNITS // 2), "without any noise, z counts as 1"


def test_the_largest_share_cuts_the_heaviest() -> None:
    assert weights(name="examples", max_share=0.5).values == (100, 50, 150, 0)
    assert weights(name="examples", max_share=0.6).values == (100, 50, 200, 0)
    assert weights(name="examples", max_share=0.34).values == (53, 50, 53, 0)
    # A round of two may be that of the two lightest clients, or of the lightest and the heaviest.
    assert weights(clients=2, name="examples", max_share=0.5).values == (50, 50, 50, 0)
    with pytest.raises(WeightingError, match="a round has 2 clients with examples"):
        weights(clients=2, name="examples", max_share=0.4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    noises=st.lists(st.floats(0.01, 100.0), min_size=9, max_size=9),
    share=st.floats(0.01, 1.0),
    per_round=st.integers(1, 9),
    name=st.sampled_from(["examples", "examples_over_noise"]),
)
def test_no_round_has_a_client_above_the_largest_share(
    sizes: list[int], noises: list[float], share: float, per_round: int, name: str
) -> None:
    """In the worst round of every client; and a bound one unit larger would break it."""
    clients = [PlanValues(n, z) for n, z in zip(sizes, noises, strict=False)]
    count = min(per_round, sum(size > 0 for size in sizes))
    weighting = WeightingSettings.model_validate({"name": name, "max_share": share})
    if count and Fraction(share) * count < 1:
        with pytest.raises(WeightingError):
            plan_weights(weighting, clients, clients_per_round=per_round)
        return
    found = plan_weights(weighting, clients, clients_per_round=per_round).values
    assert [value > 0 for value in found] == [size > 0 for size in sizes]
    for client, value in enumerate(found):
        others = sorted(v for other, v in enumerate(found) if v and other != client)
        assert value <= Fraction(share) * (value + sum(others[: count - 1]))
    if name == "examples" and count and max(found) < max(sizes):
        larger = sorted(min(size, max(found) + 1) for size in sizes if size)
        assert larger[-1] > Fraction(share) * (larger[-1] + sum(larger[: count - 1]))


def test_a_name_alone_is_the_mapping_with_its_defaults() -> None:
    named = FederationSettings(rounds=1, weighting="examples_over_noise").weights
    assert named == WeightingSettings(name="examples_over_noise")
    assert named.powers == (1.0, 1.0)
    assert named.uses_sizes
    assert not WeightingSettings(name="examples_over_noise", size_power=0.0).uses_sizes
