"""Events broken down into the mechanisms that accountants know how to add up."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fedsim.accountant.events import (
    Composed,
    Event,
    Gaussian,
    NonPrivate,
    PoissonSampled,
    SelfComposed,
)


class UnsupportedEventError(ValueError):
    """The event, or a part of it, is one for which the accountant has no proof."""


class SampledGaussian(NamedTuple):
    """One step: Poisson sampling at rate q, then a Gaussian release with noise multiplier z > 0.

    q = 1 is the plain Gaussian mechanism; q = 0 never occurs here, as it releases nothing.
    """

    sampling_rate: float
    noise_multiplier: float


@dataclass
class Breakdown:
    """What an event adds to an account.

    Attributes:
        steps: how often each mechanism runs.
        non_private: whether something was released without any guarantee.
    """

    steps: Counter[SampledGaussian] = field(default_factory=Counter)
    non_private: bool = False


def break_down(event: Event, count: int = 1) -> Breakdown:
    """Returns the mechanisms in `count` times `event`.

    Several Gaussians inside one Poisson sample look at the same sample and so are one Gaussian
    with z = (sum of z_i^-2)^(-1/2) (McMahan et al. 2018, arXiv:1812.06210, section 3); counting
    them as separately sampled steps would under-report.

    Raises:
        UnsupportedEventError: names the sub-event that has no rule here.
    """
    breakdown = Breakdown()
    _collect(event, count, breakdown)
    return breakdown


def _collect(event: Event, count: int, into: Breakdown) -> None:
    # The whole event is walked even where a count is 0: an event is supported or it is not.
    match event:
        case Gaussian():
            _add_step(1.0, event.noise_multiplier, count, into)
        case NonPrivate():
            into.non_private |= count > 0
        case SelfComposed():
            _collect(event.event, count * event.count, into)
        case Composed():
            for part in event.events:
                _collect(part, count, into)
        case PoissonSampled():
            inside = Breakdown()
            _collect_joint(event.event, 1, event, inside)
            if event.sampling_rate > 0:
                into.non_private |= inside.non_private and count > 0
                if inside.steps:
                    _add_step(event.sampling_rate, _joint_noise(inside.steps), count, into)
        case _:
            raise UnsupportedEventError(f"no accounting rule for {event!r}")


def _add_step(rate: float, noise: float, count: int, into: Breakdown) -> None:
    if noise == 0.0:
        into.non_private |= count > 0
    elif count > 0:
        into.steps[SampledGaussian(rate, noise)] += count


def _collect_joint(event: Event, count: int, whole: Event, into: Breakdown) -> None:
    """Collects the Gaussians that are released about one and the same sample of `whole`."""
    match event:
        case Gaussian() | NonPrivate():
            _collect(event, count, into)
        case SelfComposed():
            _collect_joint(event.event, count * event.count, whole, into)
        case Composed():
            for part in event.events:
                _collect_joint(part, count, whole, into)
        case _:
            raise UnsupportedEventError(f"no accounting rule for {event!r} inside {whole!r}")


def joint_noise_multiplier(steps: Mapping[float, int]) -> float:
    """Returns the z of the one Gaussian that equals several: (sum of n_i z_i^-2)^(-1/2).

    Args:
        steps: how often each noise multiplier z_i > 0 occurs; not empty.
    """
    least = min(steps)  # taken out of the sum: no square over- or underflows
    return least / math.sqrt(sum(n * (least / z) ** 2 for z, n in steps.items()))


def _joint_noise(steps: Mapping[SampledGaussian, int]) -> float:
    return joint_noise_multiplier({step.noise_multiplier: n for step, n in steps.items()})
