"""Runs a client's private training with canaries, and records what an adversary sees of it.

Rounds are run a second time with the same noise and without gradients: the difference is exactly
what the examples add, with no statistical error. If the privacy unit is the client, its examples
share one parameter with a steep loss, so that the update exceeds its clip norm in this coordinate
alone; it shows, up to noise, whether the client took part. The second run is then without data.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.accountant.checks import Floats
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.gradients.rule_gradients import scaled_loss
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.clients.mechanisms.contract import Mechanism
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.clients.sampling.sampling import PoissonSampling, Sampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose, stream
from fedsim.federation.federation import Federation
from fedsim.federation.trained_model import NUM_CHECK_EXAMPLES, public_examples, to_tensors
from fedsim.protocol.noisy_sums import AdaptiveClipNorm
from fedsim.tools.attack.adversaries import OtherNoise, SumView
from fedsim.tools.attack.canaries import (
    CANARY_SCALE,
    CanaryModel,
    CanaryView,
    num_groups,
    with_canaries,
)

Bools = NDArray[np.bool_]

MAX_COORDINATES = 1000  # observed of each client, at least one for each of as many examples
_MAX_VALUES = 1 << 21  # of a table with spare coordinates
_MAX_PAIRED_ROUNDS = 30  # run a second time without gradients, or without data


@dataclass(frozen=True)
class Observations:
    """What an adversary sees of the canary coordinates of one client, in each step and round.

    The first coordinates belong to examples; under client-level DP, the first one belongs to the
    client. The spare coordinates after them belong to no example and show only noise.
    """

    released: Floats  # in the noisy sum of each step (steps, coordinates), over its clip norm C
    drawn: Bools  # whether an example was in a step's batch (steps, examples)
    has_canary: Bools  # (examples,); a canary adds at most 1 to `released`
    contributions: Floats  # measured values that canaries added to sums (n,), in units of C
    contribution_error: float  # largest rounding error of a contribution, in units of C
    uploads: Floats  # in each round's update (rounds, coordinates); canaries add > 0
    signals: Floats  # what gradients without noise add to `uploads` (rounds, canaries)
    round_steps: int  # steps of a round

    @property
    def inside(self) -> Bools:
        """Whether a coordinate's canary was in a step's batch, bool (steps, coordinates)."""
        return np.pad(self.drawn & self.has_canary, ((0, 0), (0, self._num_spares)))

    @property
    def is_member(self) -> Bools:
        """Whether a coordinate's canary is in the client's data, bool (coordinates,)."""
        return np.pad(self.has_canary, (0, self._num_spares))

    @property
    def _num_spares(self) -> int:
        return self.released.shape[1] - self.has_canary.size


@dataclass(frozen=True)
class _Round:
    released: Floats  # (steps, coordinates), in units of the clip norm
    drawn: Bools  # whether an example with a coordinate was in the batch (steps, examples)
    upload: Floats  # (coordinates,)
    adapted_clip_norm: AdaptiveClipNorm | None  # after the round; None if it is fixed


M = TypeVar("M", bound=Mechanism)


class _Rounds(ABC, Generic[M]):
    """Runner of rounds of one client, as in a run, whose canaries an adversary observes.

    Some rounds are run again with and without content (gradients, or all data of the client), to
    measure what it adds. The number of steps is rounded up to whole rounds.
    """

    sampling: Sampling  # that the client is charged for
    charged_noise: float  # σ / C on a canary's coordinate; need not be the noise that is added
    is_fixed: bool  # single uploads can be compared, since all rounds have one clip norm
    _release: M
    _has_canary: Bools
    _shared_model: SharedModel

    def __init__(self, federation: Federation, client: int, steps: int, round_steps: int) -> None:
        experiment, self._plan = federation.experiment, (federation.plan.clients or ())[client]
        self._federation, self._client, self._round_steps = federation, client, round_steps
        self._num_rounds = -(-steps // round_steps)
        # Without other views of an example, which is an index in a model with canaries.
        self._local = experiment.local.without_schedule().with_equal_views()

    def observe(self) -> Observations:
        canaries, secure = self._has_canary, self._plan.secure_noise
        observed, moved, signals = list[_Round](), list[Floats](), list[Floats]()
        largest = 0.0
        for number in range(1, self._num_rounds + 1):
            seen = self._run(number, secure=secure)
            observed.append(seen)
            if number <= _MAX_PAIRED_ROUNDS:
                noise, whole = self._run(number, has_content=False), seen
                if secure or not seen.drawn.any():
                    whole = self._run(number, has_content=True)
                added = (whole.released[0] - noise.released[0])[: canaries.size]
                moved.append(added[whole.drawn[0] & canaries])
                signals.append((whole.upload - noise.upload)[: canaries.size][canaries])
                largest = max(largest, float(np.abs(whole.released[0]).max()))
            self._release = self._release.resume(seen.adapted_clip_norm)
        eps = torch.finfo(self._shared_model.parameters.data.dtype).eps
        return Observations(
            released=np.concatenate([seen.released for seen in observed]),
            drawn=np.concatenate([seen.drawn for seen in observed]),
            has_canary=canaries,
            contributions=np.concatenate(moved),
            contribution_error=4.0 * eps * largest,  # a difference has the errors of both values
            uploads=np.stack([seen.upload for seen in observed]),
            signals=np.stack(signals),
            round_steps=self._round_steps,
        )

    @abstractmethod
    def _run(self, number: int, *, has_content: bool | None = None, secure: bool = False) -> _Round:
        """Train one round with content, or only noise (None: as in a run); return what is seen."""


class ExampleRounds(_Rounds[DpSgdMechanism]):
    """Rounds of one client, half of whose examples have a canary of their own."""

    def __init__(
        self, federation: Federation, client: int, view: SumView | None, steps: int
    ) -> None:
        plan, experiment = (federation.plan.clients or ())[client], federation.experiment
        super().__init__(federation, client, steps, plan.round_steps)
        release, size = plan.release_as(DpSgdMechanism), federation.data.clients.size(client)
        order = stream(experiment.seed, Purpose.CANARIES, client=client).permutation(size)
        has_canary = order < (size + 1) // 2
        spares = max(0, min(MAX_COORDINATES, _MAX_VALUES // max(1, steps)) - size)  # of no example
        gradients, self._targets = _canary_gradients(
            federation, client, has_canary, spares=spares, groups=num_groups(release)
        )
        self._gradients = gradients
        self._without = copy(gradients)  # the same noise, and nothing of the examples
        self._without.loss = scaled_loss(gradients.loss, 0.0)
        self._index = torch.arange(size, device=self._targets.device)
        self._shared_model = SharedModel(gradients.model, parameters=gradients.parameters)
        self._release = with_canaries(release, gradients.parameters)
        self._view = CanaryView.of(self._release, gradients.parameters, MAX_COORDINATES)
        first = self._view.places[0]
        self._has_canary = has_canary[: first.stop - first.start]
        self._others = view and OtherNoise(
            federation, view, gradients, self._targets, self._shared_model, gradients.loss
        )
        self.sampling = self._release.sampling
        self.charged_noise = self._view.charged_noise(self._release)
        self.is_fixed = self._release.clipping.adapted_clip_norm is None

    def _run(self, number: int, *, has_content: bool | None = None, secure: bool = False) -> _Round:
        rows: list[tuple[Floats, Bools]] = []
        others = self._others
        added = others and others.of_round(number, secure=secure)[self._view.places[0]]

        def record(
            batches: Sequence[np.ndarray | None],
            released: Tensor,
            used: Sequence[DpSgdMechanism | None],
        ) -> None:
            (batch,), (mechanism,) = batches, used
            if batch is None or mechanism is None:
                return
            if others is None or added is None:
                bounds = mechanism.groups(self._gradients.parameters).bounds
                seen = self._view.read(released[0], mechanism, bounds)
                seen = seen * (mechanism.expected_batch / bounds[self._view.groups[0]])
            else:
                seen = released[0, self._view.places[0]]  # of sums, whose clients have one group
                seen = (seen.double() + added) * others.view.step_length
            rows.append((seen.cpu().numpy(), np.isin(np.arange(self._has_canary.size), batch)))

        key = StreamKey(self._federation.experiment.seed, self._client, number)
        steps = range((number - 1) * self._round_steps, number * self._round_steps)
        data, part = (self._index, self._targets), self._plan.part
        member = BlockMember(*data, key, steps, self._release, secure, part)
        gradients = self._without if has_content is False else self._gradients
        block = block_of(self._shared_model, gradients.loss, gradients, self._local, [member])
        result = block.train(record)
        released, drawn = (np.array(column) for column in zip(*rows, strict=True))
        if others is not None:  # the integers are the upload
            return _Round(released, drawn, released[0], None)
        moved = self._shared_model.start_values - result.values[0]
        bounds = self._release.groups(self._gradients.parameters).bounds
        upload = self._view.read(moved, self._release, bounds).cpu().numpy()
        return _Round(released, drawn, upload, result.adapted_clip_norm[0])


def _canary_gradients(
    federation: Federation, client: int, has_canary: Bools, *, spares: int, groups: int
) -> tuple[PerExampleGradients, Tensor]:
    """Return (per-example gradients of the client's model with canaries, its targets).

    As in a run, public examples, which are in no batch, decide how gradients are computed.
    """
    device, bound = federation.model.device, (federation.plan.client_privacy or ())[client]
    features, targets = to_tensors(federation.data.clients[client], device)
    public = public_examples(federation.data, NUM_CHECK_EXAMPLES)
    check_features, check_targets = to_tensors(public, device)
    carries = torch.zeros(len(features) + len(check_features), device=device)
    carries[: len(features)] = torch.from_numpy(has_canary)
    network, loss = _network_and_loss(federation, check_features)
    examples, clip_norm = torch.cat([features, check_features]), bound.privacy.clip_norm
    model = CanaryModel(network, examples, carries, clip_norm, spares=spares, groups=groups)
    checks = torch.arange(len(features), len(carries), device=device)
    return gradients_for(model.to(device), loss, checks, check_targets), targets


def _network_and_loss(federation: Federation, features: Tensor) -> tuple[nn.Module, PerExampleLoss]:
    network, loss = deepcopy(federation.model.module), federation.model.loss
    with preserve_state(network), torch.no_grad():
        shape = network(features[:1]).shape[1:]

    def loss_with_canary(outputs: Tensor, targets: Tensor) -> Tensor:
        predictions = outputs[:, :-1].reshape(len(outputs), *shape)
        return loss(predictions, targets) + outputs[:, -1]

    return network, loss_with_canary


class CanaryClient(nn.Module):
    """A model with one canary parameter, whose gradient in each example's loss is `steepness`."""

    def __init__(self, model: nn.Module, steepness: float) -> None:
        super().__init__()
        self.model, self._steepness = model, steepness
        self.canaries = nn.Parameter(torch.zeros(MAX_COORDINATES))

    def forward(self, features: Tensor) -> Tensor:
        """Return outputs (n, outputs + 1) for examples (n, ...); the last is the canary term."""
        outputs = self.model(features).flatten(1)
        canary = self._steepness * self.canaries[:1].expand(len(outputs), 1)
        return torch.cat([outputs, canary], dim=1)


class UpdateRounds(_Rounds[UpdateMechanism]):
    """Rounds of a client whose whole data are one canary; the charge assumes Poisson lots."""

    is_fixed = False

    def __init__(
        self, federation: Federation, client: int, view: SumView | None, steps: int
    ) -> None:
        super().__init__(federation, client, steps, 1)
        release = self._plan.release_as(UpdateMechanism)
        self._has_canary = np.ones(1, dtype=bool)
        self._data = to_tensors(federation.data.clients[client], federation.model.device)
        rate = federation.experiment.local.optimizer.lr
        network, self._loss = _network_and_loss(federation, self._data[0])
        model = CanaryClient(network, CANARY_SCALE * release.max_update_norm / rate)
        self._shared_model = SharedModel(model.to(federation.model.device))
        parameters = self._shared_model.parameters
        self._release = release.for_model(parameters)
        (self._place,) = parameters.slices([parameters.names.index("canaries")])
        self._others = view and OtherNoise(
            federation, view, None, self._data[1], self._shared_model, self._loss
        )
        self.sampling = PoissonSampling(self._plan.release.sampling_rate)
        self.charged_noise = self._release.charged_multipliers[0]

    def _run(self, number: int, *, has_content: bool | None = None, secure: bool = False) -> _Round:
        federation, draws = self._federation, self._federation.plan.participation
        if has_content is None:
            has_content = not draws.is_secret or self._client in draws.draw(number)
        features, targets = self._data if has_content else (part[:0] for part in self._data)
        key = StreamKey(federation.experiment.seed, self._client, number)
        steps = range(federation.plan.steps.whole_rounds[self._client] if has_content else 0)
        part = self._plan.part
        member = BlockMember(features, targets, key, steps, self._release, secure, part)
        result = block_of(self._shared_model, self._loss, None, self._local, [member]).train()
        seen = result.values[0].double()
        if (others := self._others) is None:
            seen = (seen - self._shared_model.start_values) / self._release.max_update_norm
        else:
            seen = (seen + others.of_round(number, secure=secure)) * others.view.step_length
        upload = -seen[self._place].cpu().numpy()
        return _Round(upload[np.newaxis], np.array([[has_content]]), upload, None)
