"""Noise-to-signal ratio of the averaged model after all rounds: a model of the error.

docs/howto/advice.md derives it. With clipping bound C as the unit of length of a gradient, the
global model moves by r = lr · C a step along N = rounds · steps steps. In a direction of curvature
λ the signal after them is S(λ) = 1 − (1 − hλ)^N with h = κ r, and independent noise of variance σ²
a step has grown to h² σ² (1 − (1 − hλ)^2N) / (1 − (1 − hλ)²): the contraction of gradient descent
on a quadratic. A classifier's decisions do not depend on the length of its weights, so the error is
everything but the signal over the signal: the squared tangent of the angle between the model and
the noiseless optimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """Unknown properties of a learning task; the advice averages over plausible ones.

    Attributes:
        curvature: κ, largest curvature in units of 1 / C.
        alignment: ρ², squared length of the mean clipped gradient over C² at the start.
        spread: smallest curvature over the largest.
        start: squared length of the initial model over that of the optimum.
        oscillation: squared error that steps of length h = 1 leave, times their number.
        skew: squared distance between optima of clients, per unit of label skew.
        drift: squared error that a local step of length h = 1 adds, per unit of label skew.
        sampling: variance of clipped gradients of examples, over ρ² C².
    """

    curvature: float
    alignment: float
    spread: float
    start: float
    oscillation: float
    skew: float
    drift: float
    sampling: float


# Fitted by benchmarks/advice.py --fit to federations that no test and no page reports.
TYPICAL_TASK = Task(
    curvature=0.018,
    alignment=0.6,
    spread=0.1,
    start=0.0015,
    oscillation=80.0,
    skew=0.075,
    drift=0.3,
    sampling=0.0001,
)
_CURVATURES, _ALIGNMENTS = (1 / 3, 1.0, 3.0), (0.4, 1.0, 2.5)
_NUM_DIRECTIONS = 6
_LARGEST_GROWTH, _LARGEST_RATIO = 1.2, 1e2  # clipping bounds a step that is too long


@dataclass(frozen=True, eq=False)
class Schedules:
    """What the error of some candidates depends on; arrays (candidates,).

    Attributes:
        rounds: T.
        steps: local steps of a round.
        reach: r = lr · C.
        noise: d Σ w_k² (z_k / L_k)², variance of the noise in the average of one step, over C².
        sampling: Σ w_k² (1 − q_k) / L_k, variance by drawn lots, over that of one example.
        weight_skew: Σ (w_k − n_k / n)².
        label_skew: expected squared distance of a client's label distribution.
    """

    rounds: Floats
    steps: Floats
    reach: Floats
    noise: Floats
    sampling: Floats
    weight_skew: Floats
    label_skew: float


def plausible_tasks(typical: Task = TYPICAL_TASK) -> tuple[Task, ...]:
    """Return the tasks that the advice averages over, the typical one in the middle."""
    return tuple(
        Task(
            **{
                **vars(typical),
                "curvature": typical.curvature * curvature,
                "alignment": typical.alignment * alignment,
            }
        )
        for curvature, alignment in product(_CURVATURES, _ALIGNMENTS)
    )


def noise_to_signal(schedules: Schedules, task: Task) -> Floats:
    """Return the predicted noise-to-signal ratio of each candidate on one task, (candidates,).

    Args:
        schedules: of the candidates.
        task: properties of the learning task.
    """
    steps = schedules.rounds * schedules.steps
    h = task.curvature * schedules.reach
    curvatures = task.spread ** np.linspace(1.0, 0.0, _NUM_DIRECTIONS)
    factor = np.minimum(np.abs(1.0 - h[:, None] * curvatures), _LARGEST_GROWTH)
    rest = np.minimum(factor ** steps[:, None], _LARGEST_RATIO)
    signals = np.clip(1.0 - rest, 1e-3, 1.0)
    signal = signals.mean(axis=1)
    growth = np.abs((1.0 - rest**2) / (1.0 - factor**2 + 1e-9)).mean(axis=1)
    variance = schedules.noise + task.sampling * schedules.sampling
    noise = variance / task.alignment * h**2 * growth
    uneven = np.square(signals).mean(axis=1) - np.square(signal)
    unstable = np.where(rest > 1.0, rest, 0.0).mean(axis=1)
    start = task.start * np.square(rest).mean(axis=1)
    bias = task.skew * schedules.weight_skew * np.square(signal)
    drift = task.drift * np.square(h * (schedules.steps - 1.0))
    error = uneven + unstable + start + noise + task.oscillation * h**4 / steps
    error += schedules.label_skew * (bias + drift)
    return error / np.square(signal)


def predicted_errors(schedules: Schedules, tasks: Sequence[Task]) -> Floats:
    """Return the noise-to-signal ratio of each candidate on each task, (tasks, candidates).

    Args:
        schedules: of the candidates.
        tasks: plausible tasks.
    """
    return np.stack([noise_to_signal(schedules, task) for task in tasks])


def mean_errors(errors: Floats) -> Floats:
    """Return the geometric mean over tasks, (candidates,); the order of candidates is its order.

    Args:
        errors: (tasks, candidates).
    """
    return np.exp(np.log(errors + 1e-3).mean(axis=0))
