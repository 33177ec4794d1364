"""Groups by patterns: who is in which, their noise together, and bounds that follow quantiles."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedsim.accountant import JointGaussian
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import ChosenNoise, PatternClipping, exclusive_groups
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.gradients.per_example import BatchStatistics
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.member import StreamKey

NAMES = ("conv.weight", "conv.bias", "head.weight", "head.bias")
PATTERNS = ("conv.*", "*")
FREE = ChosenNoise((None, None), (1.0, 1.0))


def step(clipping: PatternClipping, noise: ChosenNoise, z: float = 1.5) -> DpSgdMechanism:
    return DpSgdMechanism(PoissonSampling(0.5), clipping, z, 40.0, noise, largest_batch=80)


def parameters() -> FlatParameters:
    model = nn.ModuleDict({"conv": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    return FlatParameters(model)


@pytest.mark.parametrize("order", [("conv.*", "*"), ("*", "conv.*")])
def test_the_star_takes_all_others_in_any_order(order: tuple[str, ...]) -> None:
    found = dict(zip(order, exclusive_groups(NAMES, order), strict=True))
    assert found == {"conv.*": (0, 1), "*": (2, 3)}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("conv.*",), "parameter 'head.weight' is in no group"),
        (("conv.*", "*.bias", "*"), "parameter 'conv.bias' is in the groups 'conv.*' and '*.bias'"),
        (("conv.*", "norm.*", "*"), "group 'norm.*' has no parameter"),
        (("conv.*", "head.*", "*"), "group '*' has no parameter"),
    ],
)
def test_every_parameter_is_in_exactly_one_group(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match="group") as caught:
        exclusive_groups(NAMES, patterns)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "relative", "expected"),
    [
        ((None, None), (1.0, 1.0), (1.5 * math.sqrt(2), 1.5 * math.sqrt(2))),
        ((None, None), (1.0, 2.0), (1.5 * math.sqrt(1.25), 3.0 * math.sqrt(1.25))),
        ((3.0, None), (1.0, 1.0), (3.0, 1.5 / math.sqrt(0.75))),
    ],
)
def test_groups_without_noise_share_what_is_left(given, relative, expected) -> None:
    found = ChosenNoise(given, relative).multipliers(1.5)
    assert found == pytest.approx(expected, rel=1e-12)
    assert group_noise_multiplier(found) == pytest.approx(1.5, rel=1e-12)


def test_given_noise_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is left for the other groups"):
        step(PatternClipping(PATTERNS, (0.3, 0.4)), ChosenNoise((1.5, None), (1.0, 1.0)))


@pytest.mark.parametrize("count_noise", [None, 4.0])
def test_the_charge_is_joint_over_groups_and_counts(count_noise: float | None) -> None:
    clipping = PatternClipping(PATTERNS, (0.3, 0.4))
    if count_noise is not None:
        clipping = AdaptiveClipping(PATTERNS, (0.3, 0.4), count_noise)
    bound = step(clipping, ChosenNoise((None, None), (1.0, 2.0))).for_model(parameters())
    assert isinstance(bound.mechanism, JointGaussian)
    parts = bound.mechanism.noise_multipliers
    assert group_noise_multiplier(parts) == pytest.approx(1.5, rel=1e-3)
    assert parts[1] == pytest.approx(2 * parts[0], rel=1e-5)
    assert parts[2:] == pytest.approx(() if count_noise is None else (8.0, 8.0), rel=1e-3)
    sigmas = bound.standard_deviations(bound.groups(parameters()))
    charged = [s / c for s, c in zip(sigmas, clipping.bounds, strict=True)]
    assert charged == pytest.approx(parts[:2], rel=1e-3)  # what is added is what is charged


def test_all_noise_given_and_counts_are_charged_together() -> None:
    clipping = AdaptiveClipping(PATTERNS, (0.3, 0.4), 4.0)
    whole = clipping.whole_noise(group_noise_multiplier((1.2, 2.0)))
    assert whole == pytest.approx((1.2**-2 + 2.0**-2 + 2 * 8.0**-2) ** -0.5, rel=1e-12)
    bound = step(clipping, ChosenNoise((1.2, 2.0), (1.0, 1.0)), whole).for_model(parameters())
    assert isinstance(bound.mechanism, JointGaussian)
    assert bound.mechanism.noise_multipliers == pytest.approx((1.2, 2.0, 8.0, 8.0), rel=1e-3)


def test_each_bound_follows_its_own_quantile() -> None:
    clipping = AdaptiveClipping(PATTERNS, (0.3, 0.4), 4.0, quantile=0.5, learning_rate=0.2)
    at, noise = step(clipping, FREE).for_model(parameters()), StreamKey(1, 0, 1).noise(secure=False)
    found = replace(at, expected_batch=4e6).adapt(
        BatchStatistics(4_000_000, 0, (4_000_000, 0)), noise
    )
    bounds = found.clipping.adapted_clip_norm
    assert bounds == pytest.approx((0.3 * math.exp(-0.1), 0.4 * math.exp(0.1)), rel=1e-4)
    assert found.bound_groups == replace(at.groups(parameters()), bounds=bounds)
    assert found.event == replace(at, expected_batch=4e6).event


def test_learnt_bounds_are_resumed_one_for_each_group() -> None:
    clipping = AdaptiveClipping(PATTERNS, (0.3, 0.4), 4.0)
    assert clipping.resume((0.1, 0.2)).bounds == (0.1, 0.2)
    for wrong in (0.1, (0.1,), (0.1, -0.2), (0.1, math.nan)):
        with pytest.raises(ValueError, match=r"adapted clip norm|adaptive clip norm"):
            clipping.resume(wrong)
    with pytest.raises(ValueError, match="cannot resume from an adapted one"):
        PatternClipping(PATTERNS, (0.3, 0.4)).resume((0.1, 0.2))


def test_members_of_one_grouping_train_together_and_others_do_not() -> None:
    clipping = PatternClipping(PATTERNS, (0.3, 0.4))
    assert clipping.kind == PatternClipping(PATTERNS, (0.5, 0.1)).kind
    assert clipping.kind != PatternClipping(("head.*", "*"), (0.3, 0.4)).kind
    assert clipping.kind != AdaptiveClipping(PATTERNS, (0.3, 0.4), 2.0).kind


def test_groups_are_those_of_the_model() -> None:
    found = PatternClipping(PATTERNS, (0.3, 0.4)).groups(parameters())
    assert (found.members, found.dimensions) == (((0, 1), (2, 3)), (16, 10))
    assert found.sensitivity == pytest.approx(0.5)
    assert torch.isfinite(torch.tensor(found.bounds)).all()
