"""Curves of ε over the number of training steps, computed by several privacy bounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.accountant import Gaussian, PoissonSampled, checks
from fedsim.accountant.events import Adjacency
from fedsim.accountant.textbook.bounds import Bound, Charges
from fedsim.core.text_formats import json_value


@dataclass(frozen=True, kw_only=True)
class CurveSchedule:
    """A schedule of equal steps, whose ε is computed after different numbers of steps."""

    clients: tuple[int, ...] = ()  # none for a schedule that is not of an experiment
    sampling_rate: float
    noise_multiplier: float
    delta: float
    adjacency: Adjacency = "zero_out"
    steps: int
    charges: Callable[[int], Charges] = field(repr=False, compare=False)  # of the first n steps

    @property
    def text(self) -> str:
        """Rate q, noise multiplier z and δ as text, such as `q = 0.01, z = 1, δ = 1e-05`."""
        return f"q = {self.sampling_rate:.4g}, z = {self.noise_multiplier:.4g}, δ = {self.delta:g}"


@dataclass(frozen=True)
class BoundCurve:
    """Curves of ε over the number of steps of one schedule: one curve for each bound on ε."""

    schedule: CurveSchedule
    bounds: tuple[Bound, ...]
    points: tuple[tuple[int, tuple[float | None, ...]], ...]  # (steps, ε); None: not covered

    @property
    def last(self) -> tuple[float | None, ...]:
        """Values of ε after all steps, one for each bound, in the order of `bounds`."""
        return self.points[-1][1]

    @property
    def smallest(self) -> float:
        """Smallest ε of all bounds after all steps."""
        return min((epsilon for epsilon in self.last if epsilon is not None), default=math.inf)

    def to_json(self) -> dict[str, Any]:
        """Return the curve as a JSON value; an infinite ε is null, and an ε of None is left out."""
        names = [bound.name for bound in self.bounds]
        points = list[dict[str, Any]]()
        for steps, row in self.points:
            known = {n: x for n, x in zip(names, row, strict=True) if x is not None}
            points.append({"steps": steps, "epsilon": known})
        schedule = {key: x for key, x in vars(self.schedule).items() if key != "charges"}
        return json_value({**schedule, "points": points})


def given_schedule(
    *, sampling_rate: float, noise_multiplier: float, delta: float, steps: int
) -> CurveSchedule:
    """Return a schedule of Poisson-sampled Gaussian steps; ε holds for zero-out and add-remove."""
    rate = checks.positive("sampling_rate", checks.probability("sampling_rate", sampling_rate))
    step = PoissonSampled(rate, Gaussian(checks.positive("noise_multiplier", noise_multiplier)))
    return CurveSchedule(
        sampling_rate=rate,
        noise_multiplier=noise_multiplier,
        delta=checks.open_probability("delta", delta),
        steps=checks.positive_whole_number("steps", steps),
        charges=lambda count: ((step, count),),
    )


def bound_curve(
    schedule: CurveSchedule, bounds: Sequence[Bound], steps: Sequence[int] | None = None
) -> BoundCurve:
    """Return the curve of ε after the given steps (default: after all), by each of several bounds.

    The small addition to ε for the error of fedsim's noise sampler is left out.
    """
    points = list[tuple[int, tuple[float | None, ...]]]()
    for number in sorted(set(steps or (schedule.steps,))):
        charges = tuple(schedule.charges(number))
        epsilons = (each.epsilon(charges, schedule.delta, schedule.adjacency) for each in bounds)
        points.append((number, tuple(epsilons)))
    return BoundCurve(schedule, tuple(bounds), tuple(points))


def even_numbers(first: int, last: int, count: int) -> tuple[int, ...]:
    """Return about `count` (>= 2) whole numbers from `first` to `last`, even in their logarithm."""
    places = (first * (last / first) ** (index / (count - 1)) for index in range(count))
    return tuple(sorted({first, last, *(round(place) for place in places)}))
