"""Runs a client's private training with canaries, and records what an adversary sees of it.

Rounds are run a second time with the same noise and without gradients: the difference is exactly
what the examples add, with no statistical error. If the privacy unit is the client, its examples
share one parameter with a steep loss, so that the update exceeds its clip norm in this coordinate
alone; it shows, up to noise, whether the client took part. The second run is then without data.

| trust       | observer | sees                                                                 |
|-------------|----------|----------------------------------------------------------------------|
| local       | server   | the client's own releases                                            |
| distributed | sums     | the smallest sum that may be opened, with the fewest honest clients  |
| distributed | server   | the client's upload (integers) with the client's share of the noise  |
| central     | models   | the client's upload (integers) with the noise of the server          |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.accountant.checks import Floats
from fedsim.accountant.trust import Observer as Against
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.gradients.rule_gradients import scaled_loss
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.clients.mechanisms.contract import Mechanism, SummedMechanism
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import Accounting
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.clients.sampling.sampling import PoissonSampling, Sampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose, stream
from fedsim.federation.charged_noise import ServerDraws, honest_draws, step_length_of
from fedsim.federation.federation import Federation
from fedsim.federation.trained_model import NUM_CHECK_EXAMPLES, public_examples, to_tensors
from fedsim.planning.alternatives import privacy_of
from fedsim.protocol.noisy_sums import AdaptiveClipNorm
from fedsim.tools.attack.canaries import CANARY_SCALE, CanaryModel, CanaryView, with_canaries

Bools = NDArray[np.bool_]
M = TypeVar("M", bound=Mechanism)

MAX_COORDINATES = 1000  # observed of each client, at least one for each of as many examples
_MAX_VALUES = 1 << 21  # of a table with spare coordinates
_MAX_PAIRED_ROUNDS = 30  # run a second time without gradients, or without data


@dataclass(frozen=True)
class Claim:
    """The ε that is claimed for a client against one adversary, and what that adversary sees."""

    against: Against  # who sees single uploads, opened sums, or global models
    epsilon: float  # after all steps
    steps: int  # of the whole run
    accounting: Accounting
    step_length: float | None = None  # of integers in sums, over the sensitivity; None: no sums
    others: tuple[int, ...] = ()  # the other honest clients; the sum has their noise


def claims_of(federation: Federation, client: int) -> list[Claim]:
    """Return the claim against each adversary of a client, that of the report first."""
    plans, privacy = federation.plan.clients or (), privacy_of(federation.experiment)
    plan, step_length = plans[client], step_length_of(federation, client)
    steps, accounting = plan.steps_to_take, Accounting.of(privacy, plan.delta)
    claim = partial(Claim, steps=steps, accounting=accounting, step_length=step_length)
    claimed = accounting.epsilon(plan.charges(0, steps))
    if plan.part is None or step_length is None:
        return [claim("server", claimed, step_length=None)]
    if not plan.part.adds_noise:
        return [claim("models", claimed)]
    others = [k for k, other in enumerate(plans) if other.part is not None and k != client]
    honest = tuple(others[: honest_draws(federation.experiment) - 1])
    by_share = accounting.epsilon(plan.server_charges(0, steps) or [])
    return [claim("sums", claimed, others=honest), claim("server", by_share)]


@dataclass(frozen=True)
class Observations:
    """What an adversary sees of the canary coordinates of one client, in each step and round.

    The first coordinates belong to examples; under client-level DP, the first one belongs to the
    client. The spare coordinates after them belong to no example and show only noise.
    """

    released: Floats  # in the noisy sum of each step (steps, coordinates), over its clip norm C
    drawn: Bools  # whether an example was in a step's batch (steps, examples)
    inside: Bools  # whether a coordinate's canary was in a step's batch (steps, coordinates)
    is_member: Bools  # whether a coordinate's canary is in the client's data (coordinates,)
    contributions: Floats  # measured values that canaries added to sums (n,), in units of C
    contribution_error: float  # largest rounding error of a contribution, in units of C
    uploads: Floats  # in each round's update (rounds, coordinates); canaries add > 0
    signals: Floats  # what gradients without noise add to `uploads` (rounds, canaries)
    is_fixed: bool  # single uploads can be compared, since all rounds have one clip norm
    round_steps: int  # steps of a round
    charged_noise: float  # σ / C (noise deviation over clip norm) on a canary's coordinate
    sampling: Sampling  # that the client is charged for


@dataclass(frozen=True)
class _Round:
    released: Floats  # (steps, coordinates), in units of the clip norm
    drawn: Bools  # whether an example with a coordinate was in the batch (steps, examples)
    upload: Floats  # (coordinates,)
    adapted_clip_norm: AdaptiveClipNorm | None  # after the round; None if it is fixed


class _Rounds(ABC, Generic[M]):
    """Runner of rounds of one client, as in a run, whose canaries an adversary observes.

    The number of steps is rounded up to whole rounds. Content is gradients, or a client's data.
    """

    _sampling: Sampling
    _charged_noise: float  # by the client itself; need not be the noise that is added
    _release: M
    _has_canary: Bools
    _shared_model: SharedModel
    _data: tuple[Tensor, Tensor]  # features, or indices of examples, and targets
    _gradients: PerExampleGradients | None = None  # None if updates are released
    _loss: PerExampleLoss

    def __init__(self, federation: Federation, client: int, claim: Claim, steps: int) -> None:
        experiment, self._plan = federation.experiment, (federation.plan.clients or ())[client]
        self._federation, self._client, self._claim = federation, client, claim
        self._num_rounds = -(-steps // self._plan.round_steps)
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
        released = np.concatenate([seen.released for seen in observed])
        drawn = np.concatenate([seen.drawn for seen in observed])
        eps = torch.finfo(self._shared_model.parameters.data.dtype).eps
        spares, in_sums = (0, released.shape[1] - canaries.size), self._claim.against == "sums"
        return Observations(
            released=released,
            drawn=drawn,
            inside=np.pad(drawn & canaries, ((0, 0), spares)),
            is_member=np.pad(canaries, spares),
            contributions=np.concatenate(moved),
            contribution_error=4.0 * eps * largest,  # a difference has the errors of both values
            uploads=np.stack([seen.upload for seen in observed]),
            signals=np.stack(signals),
            is_fixed=observed[-1].adapted_clip_norm is None,
            round_steps=self._plan.round_steps,
            charged_noise=self._charged_noise * (self._plan.noise_factor if in_sums else 1.0),
            sampling=self._sampling,
        )

    @abstractmethod
    def _run(self, number: int, *, has_content: bool | None = None, secure: bool = False) -> _Round:
        """Train one round with content, or only noise (None: as in a run); return what is seen."""

    def _noise_of_others(self, number: int, *, secure: bool) -> Tensor:
        """Return the sum of all other parties' noise in a round, as integers in float64 (size,)."""
        federation, parameters = self._federation, self._shared_model.parameters
        experiment, plans = federation.experiment, federation.plan.clients or ()
        none = self._data[0][:0], self._data[1][:0]  # others train without examples
        total = torch.zeros(parameters.size, dtype=torch.float64, device=none[0].device)
        if self._claim.against == "models":
            seed = None if secure else experiment.seed
            total += ServerDraws(federation, parameters.size, seed=seed).of_round(number)
        members = list[BlockMember]()
        for client in self._claim.others:
            release = plans[client].release_as(SummedMechanism).for_model(parameters)
            key = StreamKey(experiment.seed, client, number)
            steps = release.steps_of_round(range(1), range(1), has_examples=False)
            members.append(BlockMember(*none, key, steps, release, secure, self._plan.part))
        gradients, model = self._gradients, self._shared_model
        together = gradients is not None and gradients.stacks and members  # many times as fast
        for block in [members] if together else [[member] for member in members]:
            trained = block_of(model, self._loss, gradients, self._local, block).train()
            total += trained.values.double().sum(0)
        return total


class ExampleRounds(_Rounds[DpSgdMechanism]):
    """Rounds of one client, half of whose examples have a canary of their own."""

    def __init__(self, federation: Federation, client: int, claim: Claim, steps: int) -> None:
        super().__init__(federation, client, claim, steps)
        release, device = self._plan.release_as(DpSgdMechanism), federation.model.device
        features, targets = to_tensors(federation.data.clients[client], device)
        size, seed = len(features), federation.experiment.seed
        order = stream(seed, Purpose.CANARIES, client=client).permutation(size)
        has_canary = order < (size + 1) // 2
        spares = max(0, min(MAX_COORDINATES, _MAX_VALUES // max(1, steps)) - size)  # of no example
        # As in a run, public examples, which are in no batch, decide how gradients are computed.
        public = to_tensors(public_examples(federation.data, NUM_CHECK_EXAMPLES), device)
        examples = torch.cat([features, public[0]])
        bound = (federation.plan.client_privacy or ())[client].privacy.clip_norm
        steepness = torch.zeros(len(examples), device=device)
        steepness[:size] = CANARY_SCALE * bound * torch.from_numpy(has_canary)
        network, loss = _network_and_loss(federation, public[0])
        model = CanaryModel(network, examples, steepness, spares, release.clipping).to(device)
        checks = torch.arange(size, len(examples), device=device)
        gradients = gradients_for(model, loss, checks, public[1])
        self._gradients, self._loss = gradients, loss
        self._without = copy(gradients)  # the same noise, and nothing of the examples
        self._without.loss = scaled_loss(loss, 0.0)
        self._data = torch.arange(size, device=device), targets
        parameters = gradients.parameters
        self._shared_model = SharedModel(gradients.model, parameters=parameters)
        self._release = with_canaries(release, parameters)
        self._view = CanaryView(self._release, parameters, MAX_COORDINATES)
        self._has_canary = has_canary[:MAX_COORDINATES]
        self._sampling = release.sampling
        self._charged_noise = self._view.charged_noise(self._release)

    def _run(self, number: int, *, has_content: bool | None = None, secure: bool = False) -> _Round:
        rows, parameters = list[tuple[Floats, Bools]](), self._shared_model.parameters
        unit, view = self._claim.step_length, self._view
        added = 0.0 if unit is None else self._noise_of_others(number, secure=secure)

        def record(batches: Sequence[Any], released: Tensor, used: Sequence[Any]) -> None:
            (batch,), (mechanism,) = batches, used  # of the only member
            if unit is None:
                bounds = mechanism.groups(parameters).bounds[view.groups]
                seen = view.read(released[0], mechanism, bounds)
                seen = seen * (mechanism.expected_batch / bounds[0])
            else:  # of sums, whose clients have one group
                seen = (released[0].double() + added)[view.places[0]] * unit
            rows.append((seen.cpu().numpy(), np.isin(np.arange(self._has_canary.size), batch)))

        key = StreamKey(self._federation.experiment.seed, self._client, number)
        round_steps = self._plan.round_steps
        steps = range((number - 1) * round_steps, number * round_steps)
        member = BlockMember(*self._data, key, steps, self._release, secure, self._plan.part)
        gradients = self._without if has_content is False else self._gradients
        block = block_of(self._shared_model, self._loss, gradients, self._local, [member])
        result = block.train(record)
        released, drawn = (np.array(column) for column in zip(*rows, strict=True))
        if unit is not None:  # the integers are the upload
            return _Round(released, drawn, released[0], None)
        moved = self._shared_model.start_values - result.values[0]
        bounds = self._release.groups(parameters).bounds[view.groups]
        upload = view.read(moved, self._release, bounds).cpu().numpy()
        return _Round(released, drawn, upload, result.adapted_clip_norm[0])


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

    def __init__(self, federation: Federation, client: int, claim: Claim, steps: int) -> None:
        super().__init__(federation, client, claim, steps)
        release, device = self._plan.release_as(UpdateMechanism), federation.model.device
        self._has_canary = np.ones(1, dtype=bool)
        self._data = to_tensors(federation.data.clients[client], device)
        rate = federation.experiment.local.optimizer.lr
        network, self._loss = _network_and_loss(federation, self._data[0])
        model = CanaryClient(network, CANARY_SCALE * release.max_update_norm / rate)
        self._shared_model = SharedModel(model.to(device))
        parameters = self._shared_model.parameters
        self._release = release.for_model(parameters)
        (self._place,) = parameters.slices([parameters.names.index("canaries")])
        self._sampling = PoissonSampling(self._plan.release.sampling_rate)
        self._charged_noise = self._release.charged_multipliers[0]

    def _run(self, number: int, *, has_content: bool | None = None, secure: bool = False) -> _Round:
        federation, draws = self._federation, self._federation.plan.participation
        if has_content is None:
            has_content = not draws.is_secret or self._client in draws.draw(number)
        features, targets = self._data if has_content else (part[:0] for part in self._data)
        key = StreamKey(federation.experiment.seed, self._client, number)
        steps = range(federation.plan.steps.whole_rounds[self._client] if has_content else 0)
        member = BlockMember(features, targets, key, steps, self._release, secure, self._plan.part)
        result = block_of(self._shared_model, self._loss, None, self._local, [member]).train()
        seen = result.values[0].double()
        if (unit := self._claim.step_length) is None:
            seen = (seen - self._shared_model.start_values) / self._release.max_update_norm
        else:
            seen = (seen + self._noise_of_others(number, secure=secure)) * unit
        upload = -seen[self._place].cpu().numpy()
        return _Round(upload[np.newaxis], np.array([[has_content]]), upload, None)
