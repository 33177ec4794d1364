"""Observations of a client's private training with canaries, as its server would see it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.accountant import Gaussian, JointGaussian
from fedsim.accountant.arrays import Floats
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example.interface import PerExampleGradients
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.block import BlockMember, train_block
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.training.streams import StreamKey

Bools = NDArray[np.bool_]

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

    def record(
        lots: Sequence[np.ndarray | None], released: Tensor, used: Sequence[DpSgdMechanism | None]
    ) -> None:
        for lot, mechanism in zip(lots, used, strict=True):
            if lot is None or mechanism is None:
                continue
            drawn = np.zeros(has_canary.size, dtype=bool)
            drawn[lot] = True
            bound = _bound(mechanism, gradients)
            sums = released[0, place].double().cpu().numpy() * (mechanism.expected_lot / bound)
            rows.append((sums, drawn[:count]))

    index = torch.arange(has_canary.size, device=targets.device)
    shared_model = SharedModel(gradients.model, parameters=gradients.parameters)
    for number, own in enumerate(_rounds(steps, local.steps), start=1):
        key = StreamKey(seed, client, number)
        member = BlockMember(index, targets, key, own, step, secure)
        loss = gradients.loss
        result = train_block(shared_model, loss, gradients, local, [member], on_step=record)
        step = step.resume(result.adapted_clip_norm[0])
    shared_model.restart()
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
