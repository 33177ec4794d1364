"""Observations of a client's private training with canaries, as its server would see it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.accountant import Gaussian, JointGaussian
from fedsim.accountant.arrays import Floats
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism, Lots
from fedsim.clients.dp_sgd.noise import NoiseSource
from fedsim.clients.dp_sgd.per_example.clip_factors import LotStatistics
from fedsim.clients.dp_sgd.per_example.interface import PerExampleGradients
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.local_training import StreamKey, train_private

Bools = NDArray[np.bool_]
ReleaseCallback = Callable[[np.ndarray, Tensor, DpSgdMechanism], None]

MAX_OBSERVED_CANARIES = 1000  # per client; it bounds the memory of the tables


@dataclass(frozen=True)
class Observations:
    """The released value of each canary in each step.

    Attributes:
        released: the canary's coordinate of the noisy sum (steps, canaries), in units of the
            step's clipping bound C; a canary in the lot adds at most 1.
        drawn: whether the example was in the lot (steps, canaries).
        has_canary: whether the example has a canary (canaries,).
    """

    released: Floats
    drawn: Bools
    has_canary: Bools

    @property
    def inside(self) -> Bools:
        """Whether a canary was in the lot of a step (steps, canaries)."""
        return self.drawn & self.has_canary


@dataclass(frozen=True)
class ObservedMechanism(DpSgdMechanism):
    """A mechanism that passes each lot and each release to `on_release`."""

    on_release: ReleaseCallback = field(
        default=lambda lot, released, mechanism: None, compare=False
    )

    @classmethod
    def of(cls, mechanism: DpSgdMechanism, on_release: ReleaseCallback) -> "ObservedMechanism":
        """Return `mechanism` with a callback for its releases."""
        return cls(**vars(mechanism), on_release=on_release)

    def release(
        self,
        gradients: PerExampleGradients,
        features: Tensor,
        targets: Tensor,
        *,
        lots: Lots,
        noise: NoiseSource,
        into: Tensor,
    ) -> LotStatistics:
        """Release as `DpSgdMechanism.release` does, then call `on_release`."""
        lot = self._lot(len(features), lots)
        statistics = super().release(
            gradients, features, targets, lots=iter([lot]), noise=noise, into=into
        )
        self.on_release(lot, into, self)
        return statistics


def observe(
    gradients: PerExampleGradients,
    targets: Tensor,
    has_canary: Bools,
    *,
    step: DpSgdMechanism,
    local: LocalSettings,
    seed: int,
    client: int,
    steps: int,
    secure: bool,
) -> Observations:
    """Train a client with canaries, round after round, as in a run, and record its releases.

    Only the canaries of the first `MAX_OBSERVED_CANARIES` examples are recorded.

    Args:
        gradients: per-example gradients of a `CanaryModel`.
        targets: targets of the client's examples (n, ...).
        has_canary: which examples have a canary (n,).
        step: the client's mechanism, bound to the model.
        local: the client's settings; a round has `local.steps` steps.
        seed: seed of the client's random streams.
        client: the client's number.
        steps: minimum number of steps; the count is rounded up to whole rounds.
        secure: whether lots and noise come from the operating system's random source.
    """
    count = min(has_canary.size, MAX_OBSERVED_CANARIES)
    place = _canaries(gradients, count)
    rows: list[tuple[Floats, Bools]] = []

    def record(lot: np.ndarray, released: Tensor, used: DpSgdMechanism) -> None:
        drawn = np.zeros(has_canary.size, dtype=bool)
        drawn[lot] = True
        bound = _bound(used, gradients)
        sums = released[place].double().cpu().numpy() * (used.expected_lot / bound)
        rows.append((sums, drawn[:count]))

    mechanism: DpSgdMechanism = ObservedMechanism.of(step, record)
    index = torch.arange(has_canary.size, device=targets.device)
    start = gradients.parameters.data.clone()
    for number, own in enumerate(_rounds(steps, local.steps), start=1):
        gradients.parameters.data.copy_(start)  # a round starts from the global model
        key = StreamKey(seed, client, number)
        mechanism = train_private(
            gradients, index, targets, local, mechanism, key, steps=own, secure=secure
        )
    released, drawn = (np.array(column) for column in zip(*rows, strict=True))
    return Observations(released, drawn, has_canary[:count])


def charged_noise(step: DpSgdMechanism, gradients: PerExampleGradients) -> float:
    """Return the charged noise multiplier σ / C on a canary's coordinate.

    The value comes from the charged event, not from the step that adds the noise.

    Args:
        step: the client's mechanism, bound to the model.
        gradients: per-example gradients of a `CanaryModel`.

    Raises:
        TypeError: the charged event is not Gaussian noise.
    """
    match step.mechanism:
        case Gaussian(noise_multiplier):
            return noise_multiplier
        case JointGaussian(noise_multipliers):
            return noise_multipliers[_group(step, gradients)]
        case event:
            raise TypeError(f"no noise is known for {event!r}")


def _bound(step: DpSgdMechanism, gradients: PerExampleGradients) -> float:
    return step.groups(gradients.parameters).bounds[_group(step, gradients)]


def _group(step: DpSgdMechanism, gradients: PerExampleGradients) -> int:
    index = gradients.parameters.names.index(_CANARIES)
    members = step.groups(gradients.parameters).members
    return next(number for number, group in enumerate(members) if index in group)


def _canaries(gradients: PerExampleGradients, count: int) -> slice:
    """Return the place of the first `count` canaries in a flat tensor of all parameters."""
    parameters = gradients.parameters
    (place,) = parameters.slices([parameters.names.index(_CANARIES)])
    return slice(place.start, place.start + count)


def _rounds(steps: int, round_steps: int) -> Iterator[range]:
    """Yield the step numbers of each round, for at least `steps` steps in whole rounds."""
    for start in range(0, steps, round_steps):
        yield range(start, start + round_steps)


_CANARIES = "canaries.weight"
