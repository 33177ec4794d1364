"""Runs a client's private training with canaries and writes down what its server would see."""

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
from fedsim.clients.dp_sgd.per_example.clipped_sum import LotStatistics, PerExampleGradients
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.local_training import StreamKey, train_private

Bools = NDArray[np.bool_]
Watch = Callable[[np.ndarray, Tensor, DpSgdMechanism], None]

OBSERVED = 1000  # canaries of a client: of more, the tables would fill the memory


@dataclass(frozen=True)
class Observations:
    """What happened to each canary in each step.

    Attributes:
        released: its coordinate of the noisy sum (steps, canaries), in units of the bound C of the
            step; a canary in the lot adds at most 1.
        drawn: whether its example was in the lot.
        planted: whether its example carried it (canaries,).
    """

    released: Floats
    drawn: Bools
    planted: Bools

    @property
    def inside(self) -> Bools:
        """Whether a canary took part in a step."""
        return self.drawn & self.planted


@dataclass(frozen=True)
class WatchedStep(DpSgdMechanism):
    """A step that shows each lot and each release to `watch`, and else is what it was."""

    watch: Watch = field(default=lambda lot, released, step: None, compare=False)

    @classmethod
    def of(cls, step: DpSgdMechanism, watch: Watch) -> "WatchedStep":
        """Return `step`, watched."""
        return cls(**vars(step), watch=watch)

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
        """As `DpSgdMechanism.release`."""
        lot = self._lot(len(features), lots)
        found = super().release(
            gradients, features, targets, lots=iter([lot]), noise=noise, into=into
        )
        self.watch(lot, into, self)
        return found


def observe(
    gradients: PerExampleGradients,
    targets: Tensor,
    planted: Bools,
    *,
    step: DpSgdMechanism,
    local: LocalSettings,
    seed: int,
    client: int,
    steps: int,
    secure: bool,
) -> Observations:
    """Train a client on canaries, round after round, as an engine would have it train.

    The canaries of its first `OBSERVED` examples are looked at.

    Args:
        gradients: of a `CanaryModel`.
        targets: of the client's examples.
        planted: which examples carry their canary.
        step: the client's mechanism, bound to the model.
        local: its settings; a round has `local.steps` steps.
        seed: of the streams that the client draws from.
        client: its number.
        steps: how many to take; whole rounds, so there may be a few more.
        secure: lots and noise come from the operating system.
    """
    count = min(planted.size, OBSERVED)
    place = _canaries(gradients, count)
    rows: list[tuple[Floats, Bools]] = []

    def watch(lot: np.ndarray, released: Tensor, at: DpSgdMechanism) -> None:
        drawn = np.zeros(planted.size, dtype=bool)
        drawn[lot] = True
        bound = _bound(at, gradients)
        sums = released[place].double().cpu().numpy() * (at.expected_lot / bound)
        rows.append((sums, drawn[:count]))

    mechanism: DpSgdMechanism = WatchedStep.of(step, watch)
    index = torch.arange(planted.size, device=targets.device)
    start = gradients.parameters.data.clone()
    for number, own in enumerate(_rounds(steps, local.steps), start=1):
        gradients.parameters.data.copy_(start)  # a round starts from the global model
        key = StreamKey(seed, client, number)
        mechanism = train_private(
            gradients, index, targets, local, mechanism, key, steps=own, secure=secure
        )
    released, drawn = (np.array(column) for column in zip(*rows, strict=True))
    return Observations(released, drawn, planted[:count])


def charged_noise(step: DpSgdMechanism, gradients: PerExampleGradients) -> float:
    """Return σ / C of the noise on a canary's coordinate, as it is charged.

    It is read off the event, not off the step that makes the noise.

    Raises:
        TypeError: the step is charged as something else than Gaussian noise.
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
    """Return where the first `count` canaries lie in a flat tensor."""
    parameters = gradients.parameters
    (place,) = parameters.slices([parameters.names.index(_CANARIES)])
    return slice(place.start, place.start + count)


def _rounds(steps: int, each: int) -> Iterator[range]:
    """Yield the numbers of the steps of each round, until there are `steps` of them."""
    for start in range(0, steps, each):
        yield range(start, start + each)


_CANARIES = "canaries.weight"
