"""Runs a client's private training with canaries, and records what an adversary sees of it.

To measure what examples add, rounds are run a second time with the same noise and without
gradients. The difference is exactly what the examples add, with no statistical error.

If the privacy unit is the client, all examples of the client share one extra parameter with a steep
loss, so that the update exceeds its clip norm in this coordinate alone. The coordinate shows, up to
noise, whether the client took part with its data. Here the second run is without data.
"""

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.accountant.checks import Floats
from fedsim.clients.gradients.per_example import PerExampleGradients
from fedsim.clients.gradients.rule_gradients import scaled_loss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.training.streams import StreamKey
from fedsim.federation.federation import Federation
from fedsim.federation.trained_model import to_tensors
from fedsim.protocol.noisy_sums import AdaptiveClipNorm
from fedsim.tools.attack.adversaries import OtherNoise, SumView
from fedsim.tools.attack.canaries import CanaryView, add_canary_loss

Bools = NDArray[np.bool_]

MAX_COORDINATES = 1000  # observed of each client, at least one for each of as many examples
_MAX_VALUES = 1 << 21  # of a table with spare coordinates
_MAX_PAIRED_ROUNDS = 30  # run a second time without gradients, or without data


@dataclass(frozen=True)
class Observations:
    """What an adversary sees of the canary coordinates of one client, in each step and round.

    The first coordinates belong to examples; under client-level DP, the first one belongs to the
    client. The spare coordinates after them belong to no example and show only noise.

    Attributes:
        released: the coordinates' values in the noisy sum of each step (steps, coordinates), in
            units of the step's clip norm C.
        drawn: whether an example was in a step's batch (steps, examples).
        has_canary: whether an example has a canary (examples,); a canary adds at most 1 to
            `released`.
        contributions: measured values that canaries added to sums (n,), in units of C.
        contribution_error: largest rounding error of a contribution, in units of C.
        uploads: the coordinates' values in the uploaded update of each round (rounds, coordinates);
            the sign is such that canaries add positive values.
        signals: what gradients without noise add to `uploads`, for coordinates with a canary
            (rounds, canaries).
    """

    released: Floats
    drawn: Bools
    has_canary: Bools
    contributions: Floats
    contribution_error: float
    uploads: Floats
    signals: Floats

    @property
    def inside(self) -> Bools:
        """Whether a coordinate's canary was in a step's batch, bool (steps, coordinates)."""
        inserted = np.zeros(self.released.shape, dtype=bool)
        inserted[:, : self.has_canary.size] = self.drawn & self.has_canary
        return inserted

    @property
    def is_member(self) -> Bools:
        """Whether a coordinate's canary is in the client's data, bool (coordinates,)."""
        inserted = np.zeros(self.released.shape[1], dtype=bool)
        inserted[: self.has_canary.size] = self.has_canary
        return inserted


def num_spares(examples: int, steps: int) -> int:
    """Return the number of spare canary parameters, which belong to no example.

    Args:
        examples: number of canary parameters that belong to examples.
        steps: number of observed steps.
    """
    return max(0, min(MAX_COORDINATES, _MAX_VALUES // max(1, steps)) - examples)


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
    round_steps: int,
    secure: bool,
    others: OtherNoise | None = None,
) -> Observations:
    """Train a client with canaries, round after round as in a run, and return what is observed.

    Only the first `MAX_COORDINATES` canary parameters are recorded.

    Args:
        gradients: per-example gradients of a `CanaryModel`.
        targets: targets of the client's examples (n, ...).
        has_canary: whether each example has a canary (n,).
        step: the client's mechanism, bound to the `CanaryModel`.
        local: the client's settings of local training.
        seed: seed of the client's random streams.
        client: the client's number.
        steps: minimum number of steps; the count is rounded up to whole rounds.
        round_steps: number of steps of a round.
        secure: whether batches and noise come from the operating system's random source.
        others: noise of all other parties if the adversary sees sums; None if it sees the client's
            own releases.
    """
    rounds = _Rounds(gradients, targets, local, step, seed=seed, client=client, others=others)
    canaries = has_canary[: rounds.coordinates]
    observed: list[_Round] = []
    pairs: list[tuple[_Round, _Round]] = []
    for number, step_numbers in enumerate(_rounds(steps, round_steps), start=1):
        seen = rounds.run(number, step_numbers, step, secure=secure)
        observed.append(seen)
        if number <= _MAX_PAIRED_ROUNDS:
            noise = rounds.run(number, step_numbers, step, gradient_scale=0.0)
            with_sums = rounds.run(number, step_numbers, step) if secure else seen
            pairs.append((with_sums, noise))
        step = step.resume(seen.adapted_clip_norm)
    rounds.shared_model.restart()
    count = canaries.size
    size = max(float(np.abs(seen.released[0]).max()) for seen, _ in pairs)
    return Observations(
        released=np.concatenate([seen.released for seen in observed]),
        drawn=np.concatenate([seen.drawn for seen in observed]),
        has_canary=canaries,
        contributions=np.concatenate(
            [
                (seen.released[0] - noise.released[0])[:count][seen.drawn[0] & canaries]
                for seen, noise in pairs
            ]
        ),
        contribution_error=4.0 * torch.finfo(gradients.parameters.data.dtype).eps * size,
        uploads=np.stack([seen.upload for seen in observed]),
        signals=np.stack([(seen.upload - noise.upload)[:count][canaries] for seen, noise in pairs]),
    )


@dataclass(frozen=True)
class _Round:
    """The observations of one round.

    Attributes:
        released: released values (steps, coordinates), in units of the clip norm.
        drawn: whether an example with an observed coordinate was in the batch (steps, examples).
        upload: uploaded values (coordinates,).
        adapted_clip_norm: the adaptive clip norm after the round; None if it is fixed.
    """

    released: Floats
    drawn: Bools
    upload: Floats
    adapted_clip_norm: AdaptiveClipNorm | None


class _Rounds:
    """Runner of the rounds of one client."""

    def __init__(
        self,
        gradients: PerExampleGradients,
        targets: Tensor,
        local: LocalSettings,
        step: DpSgdMechanism,
        *,
        seed: int,
        client: int,
        others: OtherNoise | None,
    ) -> None:
        self._gradients, self._others = gradients, others
        self._without = copy(gradients)  # the same noise, and nothing of the examples
        self._without.loss = scaled_loss(gradients.loss, 0.0)
        self._index = torch.arange(len(targets), device=targets.device)
        self._targets = targets
        self._local = local.without_schedule().with_equal_views()  # an example is an index here
        self._seed, self._client = seed, client
        self._view = CanaryView.of(step, gradients.parameters, MAX_COORDINATES)
        self._place = self._view.places[0]  # of sums, whose clients have one group
        self.shared_model = SharedModel(gradients.model, parameters=gradients.parameters)

    @property
    def coordinates(self) -> int:
        """Number of observed coordinates."""
        return self._view.coordinates

    def run(
        self,
        number: int,
        steps: range,
        step: DpSgdMechanism,
        *,
        gradient_scale: float = 1.0,
        secure: bool = False,
    ) -> _Round:
        """Train one round and return its observations.

        Args:
            number: number of the round.
            steps: numbers of the round's steps, counted over all rounds of the client.
            step: the mechanism at the first step of the round.
            gradient_scale: 1, or 0 for noise without gradients.
            secure: whether batches and noise come from the operating system's random source.
        """
        rows: list[tuple[Floats, Bools]] = []
        others = self._others
        added = None if others is None else others.of_round(number, secure=secure)[self._place]

        def record(
            batches: Sequence[np.ndarray | None],
            released: Tensor,
            used: Sequence[DpSgdMechanism | None],
        ) -> None:
            (batch,), (mechanism,) = batches, used
            if batch is None or mechanism is None:
                return
            drawn = np.zeros(len(self._targets), dtype=bool)
            drawn[batch] = True
            if others is None or added is None:
                bounds = mechanism.groups(self._gradients.parameters).bounds
                seen = self._view.read(released[0], mechanism, bounds)
                seen = seen * (mechanism.expected_batch / bounds[self._view.groups[0]])
            else:
                seen = (released[0, self._place].double() + added) * others.step_length
            rows.append((seen.cpu().numpy(), drawn[: self.coordinates]))

        gradients = self._gradients if gradient_scale else self._without
        key = StreamKey(self._seed, self._client, number)
        part = None if others is None else others.part
        member = BlockMember(self._index, self._targets, key, steps, step, secure, part)
        result = block_of(
            self.shared_model, gradients.loss, gradients, self._local, [member]
        ).train(record)
        released, drawn = (np.array(column) for column in zip(*rows, strict=True))
        if others is not None:  # the integers are the upload
            return _Round(released, drawn, released[0], None)
        moved = self.shared_model.start_values - result.values[0]
        bounds = step.groups(self._gradients.parameters).bounds
        upload = self._view.read(moved, step, bounds).cpu().numpy()
        return _Round(released, drawn, upload, result.adapted_clip_norm[0])


def charged_noise(step: DpSgdMechanism, gradients: PerExampleGradients) -> float:
    """Return the charged noise multiplier σ / C on a canary's coordinate.

    It is the noise multiplier that the client is charged for, not the one that is added.

    Args:
        step: the client's mechanism, bound to the `CanaryModel`.
        gradients: per-example gradients of a `CanaryModel`.

    Raises:
        TypeError: the charged event is not Gaussian noise.
    """
    return CanaryView.of(step, gradients.parameters, MAX_COORDINATES).charged_noise(step)


def _rounds(steps: int, round_steps: int) -> Iterator[range]:
    """Yield the range of step numbers of each round, for at least `steps` steps in whole rounds."""
    for start in range(0, steps, round_steps):
        yield range(start, start + round_steps)


_STEEPNESS = 1e4  # of a canary's loss, in bounds over the learning rate


class CanaryClient(nn.Module):
    """A model with an extra canary parameter, which is in the loss of all examples of a client.

    Args:
        model: the experiment's model.
        steepness: gradient of each example's loss in the canary parameter.
    """

    def __init__(self, model: nn.Module, steepness: float) -> None:
        super().__init__()
        self.model, self._steepness = model, steepness
        self.canaries = nn.Parameter(torch.zeros(MAX_COORDINATES))

    def forward(self, features: Tensor) -> Tensor:
        """Return outputs (n, outputs + 1) for examples (n, ...); the last is the canary term."""
        outputs = self.model(features).flatten(1)
        canary = self._steepness * self.canaries[:1].expand(len(outputs), 1)
        return torch.cat([outputs, canary], dim=1)


class UpdateRounds:
    """Runner of rounds of one client under client-level DP; the client's whole data are one canary.

    Rounds are run with and without the data, to measure what the data add to an upload.

    Args:
        federation: the assembled federation, whose privacy unit is the client.
        client: number of the client.
        view: the secure sum in which the adversary sees the client's upload; None if it sees the
            upload itself.
    """

    def __init__(self, federation: Federation, client: int, view: SumView | None) -> None:
        plan = (federation.plan.clients or ())[client]
        release = plan.release_as(UpdateMechanism)
        self._federation, self._client, self._plan = federation, client, plan
        self._data = to_tensors(federation.data.clients[client], federation.model.device)
        rate = federation.experiment.local.optimizer.lr
        network = deepcopy(federation.model.module)
        with preserve_state(network), torch.no_grad():
            shape = network(self._data[0][:1]).shape[1:]
        model = CanaryClient(network, _STEEPNESS * release.max_update_norm / rate)
        self._shared_model = SharedModel(model.to(federation.model.device))
        self._loss = add_canary_loss(federation.model.loss, shape)
        parameters = self._shared_model.parameters
        self.update = release.for_model(parameters)
        (self._place,) = parameters.slices([parameters.names.index("canaries")])
        self._others = (
            None
            if view is None
            else OtherNoise(
                federation, view, None, self._data[1], model=self._shared_model, loss=self._loss
            )
        )

    def observe(self, rounds: int) -> Observations:
        """Run rounds and return what the adversary sees of the client's canary.

        Args:
            rounds: number of rounds.
        """
        secure, numbers = self._plan.secure_noise, range(1, rounds + 1)
        draws = self._federation.plan.participation
        drawn = np.array(
            [not draws.is_secret or self._client in draws.draw(number) for number in numbers]
        )
        released = np.stack(
            [
                self._release(number, secure=secure, has_data=bool(present))
                for number, present in zip(numbers, drawn, strict=True)
            ]
        )
        pairs = [
            (self._release(n, has_data=True), self._release(n, has_data=False))
            for n in numbers[:_MAX_PAIRED_ROUNDS]
        ]
        moved = np.array([seen[0] - noise[0] for seen, noise in pairs])
        largest = max(float(np.abs(seen).max()) for seen, _ in pairs)
        dtype = self._shared_model.parameters.data.dtype
        return Observations(
            released=released,
            drawn=drawn[:, np.newaxis],
            has_canary=np.ones(1, dtype=bool),
            contributions=moved,
            contribution_error=4.0 * torch.finfo(dtype).eps * largest,
            uploads=released,
            signals=moved[:, np.newaxis],
        )

    def _release(self, number: int, *, has_data: bool, secure: bool = False) -> Floats:
        """Return a round's canary coordinates in units of the clip norm, with the canary's sign.

        Args:
            number: the round.
            has_data: whether the client has its examples or no examples.
            secure: whether noise comes from the operating system's random source.
        """
        federation = self._federation
        features, targets = self._data if has_data else (part[:0] for part in self._data)
        member = BlockMember(
            features,
            targets,
            StreamKey(federation.experiment.seed, self._client, number),
            range(federation.plan.steps.whole_rounds[self._client] if has_data else 0),
            secure=secure,
            part=self._plan.part,
            release=self.update,
        )
        local = federation.experiment.local.without_schedule().with_equal_views()
        result = block_of(self._shared_model, self._loss, None, local, [member]).train()
        seen = result.values[0].double()
        if self._others is None:
            seen = (seen - self._shared_model.start_values) / self.update.max_update_norm
        else:
            seen = (seen + self._others.of_round(number, secure=secure)) * self._others.step_length
        return -seen[self._place].cpu().numpy()
