"""Test releases that clients make before round 1, to measure their noise and clipping.

Releases are made from public examples. Content (such as gradients) is either far above its clipping
bound, or absent. Each type of release (steps, updates, votes, models, examples) has a subclass of
`ReleaseProbe`. `PROBES` maps the type of a mechanism, or a base class of the type, to the subclass.
No other code of the test depends on the type.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.gradients.rule_gradients import scaled_loss
from fedsim.clients.mechanisms.client_update import COUNT_SENSITIVITY
from fedsim.clients.mechanisms.contract import Mechanism, UpdateRelease
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.input_perturbation import InputMechanism
from fedsim.clients.mechanisms.output_perturbation import OutputMechanism
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL, VoteMechanism, noisy_votes
from fedsim.clients.sampling.sampling import FixedSizeSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, BlockResult, StepCallback, StreamKey
from fedsim.core.streams import Purpose
from fedsim.federation.charged_noise import (
    ChargedPart,
    Release,
    factor_of_charge,
    noted_counts,
    server_adds_noise,
    step_length_of,
    with_noted_counts,
)
from fedsim.federation.federation import Federation
from fedsim.federation.trained_model import public_examples, to_tensors
from fedsim.noise.sources import DEVIATION, NoNoise, SeededNoise

NUM_NOISE_VALUES = 1 << 16  # per block, enough to find noise that is 3 % too small
MIN_CLIENT_VALUES = 1 << 13  # noise values per client
MAX_NOISE_ROUNDS = 128  # probed rounds of a small release

_FIRST_NOISE_ROUND = 3
_MAX_NOISE_STEPS = MAX_NOISE_ROUNDS // 2  # per round, in two rounds
_FAR_ABOVE = 1e4  # size of the content, in bounds
_UPDATE_EXAMPLES, _UPDATE_STEPS = 4, 3  # training of a probed whole update
_MODEL_STEPS = 20  # training steps of a probed model

M = TypeVar("M", bound=Mechanism)


@dataclass(frozen=True)
class Trial:
    """A test round in which clients make releases with very large content, or without content.

    Content is what public examples add to a release, such as gradients.

    Attributes:
        number: the number of the round.
        steps: the numbers of the local steps to take; a mechanism without steps makes one release.
        is_large: whether the content is far above every clipping bound; if not, there is none.
        is_paired: whether another test round draws the same noise, from a seed. If not, the noise
            comes from the source of noise that the client's plan names.
    """

    number: int
    steps: range = range(1)
    is_large: bool = False
    is_paired: bool = False


class ReleaseProbe(ABC, Generic[M]):
    """Object that lets some clients make test releases from public examples, before round 1.

    There is one subclass for each type of mechanism.

    Args:
        federation: an assembled federation with privacy plans.
        block: the clients of a planned block (clients that train together), ascending.
        clients: the clients of the block to test, all of which add noise.
        seed: the seed of the test's random streams, which no run uses.
    """

    paired_rounds: ClassVar[Sequence[int]] = (1,)

    def __init__(
        self, federation: Federation, block: Sequence[int], clients: Sequence[int], seed: int
    ) -> None:
        self.federation, self.block, self.clients, self.seed = federation, block, clients, seed
        self._example = to_tensors(public_examples(federation.data, 1), federation.model.device)

    @abstractmethod
    def run(self, trial: Trial, see: Callable[[Release], None]) -> None:
        """Let every client make one release in each step of a test round.

        Args:
            trial: the test round.
            see: function that is called with each release; the next step may overwrite the
                release's values.
        """

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of values of one release."""

    @property
    def noise_values(self) -> int:
        """Number of noise values in one step of all tested clients.

        If the server adds the noise, it is the number of values that the server draws.
        """
        return self.size * (1 if server_adds_noise(self.federation) else len(self.clients))

    def noise_trials(self) -> Iterator[Trial]:
        """Yield the test rounds without content, whose releases are pure noise.

        There are at least two, so that noise that repeats is found.
        """
        wanted = max(NUM_NOISE_VALUES / self.noise_values, MIN_CLIENT_VALUES / self.size, 2)
        rounds = min(math.ceil(wanted), MAX_NOISE_ROUNDS)
        for number in range(_FIRST_NOISE_ROUND, _FIRST_NOISE_ROUND + rounds):
            yield Trial(number)

    def _plan(self, client: int) -> PrivacyPlan:
        return (self.federation.plan.clients or ())[client]

    def _mechanism(self, client: int) -> M:
        return cast(
            M, self._plan(client).release
        )  # `PROBES` chose this class by the release's type

    def _charged(self, client: int, mechanism: M) -> Iterator[float]:
        """Yield the noise multiplier of each part of a client's release that its charge assumes.

        Correlated noise is charged for the change of all releases together, and measured by its
        fresh noise.
        """
        correlation = mechanism.correlation
        factor = factor_of_charge(self.federation, client)
        factor *= 1.0 if correlation is None else correlation.column_norm
        return (factor * multiplier for multiplier in mechanism.charged_multipliers)

    def _key(self, client: int, trial: Trial) -> StreamKey:
        return StreamKey(self.seed, client, trial.number)

    def _is_secure(self, client: int, trial: Trial) -> bool:
        """Whether noise comes from the operating system, as the client's plan may say."""
        return self._plan(client).secure_noise and not trial.is_paired

    def _copies(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` copies of the public example, whose contributions add up."""
        features, targets = self._example
        return (
            features.expand(count, *features.shape[1:]),
            targets.expand(count, *targets.shape[1:]),
        )


class _TrainedProbe(ReleaseProbe[M]):
    """A probe that trains its block, with a loss that is scaled up, or to 0 for no content."""

    @abstractmethod
    def _member(self, client: int, trial: Trial) -> BlockMember:
        """Return a client as a member of the block."""

    def _train(
        self,
        trial: Trial,
        scale: float,
        *,
        rows: int | None = None,
        on_step: StepCallback | None = None,
    ) -> BlockResult:
        """Train the block; `scale` multiplies the loss so that gradients exceed every bound."""
        federation = self.federation
        loss = scaled_loss(federation.model.loss, scale if trial.is_large else 0.0)
        gradients = copy(federation.model.gradients)
        if gradients is not None:
            gradients.loss = loss
        return block_of(
            federation.model.shared,
            loss,
            gradients,
            federation.experiment.local.with_equal_views(),
            [
                self._member(client, trial) if client in self.clients else None
                for client in self.block
            ],
            rows=rows,
        ).train(on_step)


class StepProbe(_TrainedProbe[DpSgdMechanism]):
    """Maker of test releases of DP-SGD steps, where a release is a batch's noisy sum of gradients.

    Each group of parameters with its own clipping bound is measured separately. With an adaptive
    clip norm, so is the count of unclipped gradients of each group, one value a step. For
    correlated noise, the fresh noise of step t is measured. It is the sum Σ_j c_j y_{t−j} over the
    releases y of step t and earlier ones, with the coefficients c_j of the correlation.
    """

    _past: Mapping[int, list[Tensor]] = {}

    @property
    def size(self) -> int:
        """Number of values of one release."""
        return self.federation.release_parameters.size

    def noise_trials(self) -> Iterator[Trial]:
        """Yield the test rounds without content: two rounds with several steps each.

        With noisy sums of clients' updates, these are several rounds with one step each.
        """
        if self.federation.plan.sums is not None:
            yield from super().noise_trials()
            return
        steps = min(-(-NUM_NOISE_VALUES // (2 * self.noise_values)), _MAX_NOISE_STEPS)
        first = max(steps, 2)  # two steps, so that noise repeated from step to step is found
        yield Trial(_FIRST_NOISE_ROUND, range(first))
        # Correlated noise continues over rounds; else steps begin at 0, as a round and an epoch do.
        start = first if any(self._mechanism(client).correlation for client in self.clients) else 0
        yield Trial(_FIRST_NOISE_ROUND + 1, range(start, start + steps))

    def run(self, trial: Trial, see: Callable[[Release], None]) -> None:
        """Let every client release a batch's noisy sum of gradients in each step of a trial."""
        parameters = self.federation.release_parameters
        largest = max(
            max(self._mechanism(client).groups(parameters).bounds) for client in self.clients
        )

        def record(
            batches: Sequence[np.ndarray | None],
            released: Tensor,
            used: Sequence[DpSgdMechanism | None],
        ) -> None:
            for client, batch, row, step in zip(self.block, batches, released, used, strict=True):
                if step is not None:
                    examples = 0 if batch is None else len(batch)
                    within = 0 if trial.is_large else examples
                    counts = noted_counts(step.clipping, step.expected_batch, within)
                    values = self._fresh(client, step, row)
                    if counts:
                        values = torch.cat([values, values.new_tensor(counts)])
                    parts = self._parts(client, step, len(counts))
                    see(Release(client, values.unsqueeze(0), parts, reach=max(1, examples)))

        self._past = self._past if trial.steps.start else {}
        rows = self.federation.blocks.rows(self.block)
        self._train(trial, _FAR_ABOVE * largest, rows=rows, on_step=record)

    def _member(self, client: int, trial: Trial) -> BlockMember:
        plan, step = self._plan(client), self._mechanism(client)
        # Batches are empty where the sampling allows it, which costs no gradients.
        needs_all = trial.is_paired or isinstance(step.sampling, FixedSizeSampling)
        return BlockMember(
            *self._copies(plan.examples if needs_all else 0),
            self._key(client, trial),
            trial.steps,
            replace(step, clipping=with_noted_counts(step.clipping)),
            self._is_secure(client, trial),
            plan.part,
        )

    def _parts(self, client: int, step: DpSgdMechanism, counts: int) -> Sequence[ChargedPart]:
        parameters = self.federation.release_parameters
        groups, length = step.groups(parameters), step_length_of(self.federation, client)
        units = [step.expected_batch / b if length is None else length for b in groups.bounds]
        places = [
            *map(parameters.slices, groups.members),
            *([slice(self.size + m, self.size + m + 1)] for m in range(counts)),
        ]
        units += [1.0 / COUNT_SENSITIVITY] * counts
        return [*map(ChargedPart, self._charged(client, step), units, places)]

    def _fresh(self, client: int, step: DpSgdMechanism, released: Tensor) -> Tensor:
        """Return the fresh noise in a release without content (size,)."""
        if step.correlation is None:
            return released
        later, fresh = step.correlation.coefficients[1:], released.to(torch.float64, copy=True)
        past = self._past.get(client, [])
        self._past = {**self._past, client: [fresh, *past][: len(later)]}
        return fresh + sum(c * before for c, before in zip(later, past, strict=False))


class UpdateProbe(_TrainedProbe[UpdateRelease]):
    """Maker of test releases of whole updates, as a client makes one in each round.

    With an adaptive clip norm, a release also has a noisy bit: whether the update was not clipped.
    """

    @property
    def size(self) -> int:
        """Number of values of one release."""
        has_bit = self._mechanism(self.clients[0]).count_noise is not None
        return self.federation.model.shared.parameters.size + has_bit

    @property
    def noise_values(self) -> int:
        """Number of noise values that one client draws in one round.

        Unlike in the base class, other clients are not counted. So there are more test rounds,
        which are cheap, as nothing is trained.
        """
        return self.size

    def run(self, trial: Trial, see: Callable[[Release], None]) -> None:
        """Let every client release an update, and pass the release to the function `see`."""
        federation = self.federation
        largest = max(self._mechanism(client).max_update_norm for client in self.clients)
        rate = federation.experiment.local.learning_rate(trial.number)
        result, offset = self._train(trial, _FAR_ABOVE * largest / rate), None
        if federation.plan.sums is None:  # a client sends the trained values
            start = federation.model.shared.start_values.double()
            offset = torch.cat([start, start.new_zeros(self.size - len(start))])
        for client, row, count in zip(self.block, result.values, result.counts, strict=True):
            if client in self.clients:
                values = row if count is None else torch.cat([row, row.new_tensor([count])])
                see(Release(client, values.unsqueeze(0), self._parts(client), offset))

    def _member(self, client: int, trial: Trial) -> BlockMember:
        plan = self._plan(client)
        steps = min(self.federation.plan.steps.whole_rounds[client], _UPDATE_STEPS)
        return BlockMember(
            *self._copies(_UPDATE_EXAMPLES if trial.is_large else 0),
            self._key(client, trial),
            range(steps if trial.is_large else 0),
            secure=self._is_secure(client, trial),
            part=plan.part,
            release=self._mechanism(client),
        )

    def _parts(self, client: int) -> Sequence[ChargedPart]:
        """Return the parts of a release: the update, and the bit, which is ±½ without noise."""
        update, sums = self._mechanism(client), self.federation.plan.sums
        length, end = step_length_of(self.federation, client), self.size
        update_multiplier, *count = self._charged(client, update)
        in_bounds = 1.0 / update.max_update_norm if length is None else length
        in_halves = (1.0 if sums is None else sums.count_unit or 0.0) / COUNT_SENSITIVITY
        bits = [
            ChargedPart(bit_multiplier, in_halves, [slice(end - 1, end)])
            for bit_multiplier in count
        ]
        whole = [slice(0, end - len(bits))]
        return [ChargedPart(update_multiplier, in_bounds, whole, update.normal_scores), *bits]


class VoteProbe(ReleaseProbe[VoteMechanism]):
    """Maker of test releases of votes, as a client makes them with `task: pate`.

    On each query a client votes for class 0; in a round without content it votes for no class.
    Test rounds alternate between the types of votes: checks of queries, and votes on queries that
    passed.
    """

    paired_rounds = (1, 2)

    @property
    def size(self) -> int:
        """Number of vote counts in one release: queries times classes."""
        return _rows_of(self._classes) * self._classes

    @property
    def _classes(self) -> int:
        return self.federation.data.num_classes or 1

    def run(self, trial: Trial, see: Callable[[Release], None]) -> None:
        """Let every client release votes on some queries, and pass these to the function `see`."""
        label, shape = 0 if trial.is_large else NO_LABEL, (-1, self._classes)
        labels = np.full(_rows_of(self._classes), label, dtype=np.int64)
        for client in self.clients:
            plan, release = self._plan(client), self._mechanism(client).of_round(trial.number)
            votes = noisy_votes(labels, self._classes, plan, self._key(client, trial))
            values = torch.from_numpy(votes).to(self.federation.model.device).view(shape)
            [charged] = self._charged(client, release)
            deviation = DEVIATION * (1.0 if plan.part is not None else release.update_step)
            part = ChargedPart(charged, charged / deviation, [slice(None)])
            # Another vote changes two counts by 1, so a bound is √2 votes.
            see(Release(client, values, [part], reach=math.sqrt(0.5)))


class ModelProbe(ReleaseProbe[OutputMechanism]):
    """Maker of test releases of models (output perturbation), where noise is added after training.

    A model is trained on one public example with very large features, in place of a client's data.
    """

    @property
    def size(self) -> int:
        """Number of values of a released model."""
        return self.federation.model.shared.parameters.size

    def run(self, trial: Trial, see: Callable[[Release], None]) -> None:
        """Let every client release a model, and pass the releases to the function `see`.

        If another test round draws the same noise (`is_paired`), the model is trained for a few
        steps; otherwise it is not trained.
        """
        features, targets = self._copies(int(trial.is_large))
        start, order = self.federation.model.shared.start_values, np.arange(len(features))
        for client in self.clients:
            used = self._mechanism(client)
            descent, steps = used.descent, 0
            if descent is None:
                raise ValueError("a release needs the training whose sensitivity is known")
            if trial.is_paired:
                steps = min(descent.steps, _MODEL_STEPS)
                descent = replace(descent, steps=steps)
                used = replace(used, descent=descent)
            far = features * (_FAR_ABOVE * descent.problem.examples.max_feature_norm)
            noise = self._key(client, trial).noise(secure=self._is_secure(client, trial))
            values = used.release_model(start, far, targets, noise, order=order, steps=steps)
            still = replace(used, noise_multiplier=0.0)
            offset = still.release_model(
                start, far[:0], targets[:0], NoNoise(), order=order[:0], steps=steps
            )
            [charged] = self._charged(client, used)
            part = ChargedPart(charged, 1.0 / descent.sensitivity, [slice(None)])
            see(Release(client, values.unsqueeze(0), [part], offset))


class ExampleProbe(ReleaseProbe[InputMechanism]):
    """Maker of test releases of noisy examples (input perturbation).

    The noise of the features is measured. In a round without content, all features are 0.
    """

    @property
    def size(self) -> int:
        """Number of feature values in one release, of all its examples together."""
        features, _ = self._example
        return _rows_of(features.numel()) * features.numel()

    def run(self, trial: Trial, see: Callable[[Release], None]) -> None:
        """Let every client release a few noisy examples, and pass these to the function `see`."""
        features, targets = self._copies(_rows_of(self._example[0].numel()))
        for client in self.clients:
            mechanism = self._mechanism(client)
            if mechanism.bounds is None:
                raise ValueError("noisy examples need the bounds of an example")
            bound = mechanism.bounds.max_feature_norm
            given = (
                features * (_FAR_ABOVE * bound) if trial.is_large else torch.zeros_like(features)
            )
            noise = SeededNoise(self._key(client, trial).key_bytes(Purpose.EXAMPLE_NOISE))
            values, _ = mechanism.release_examples(given, targets, noise)
            charged, _ = self._charged(client, mechanism)
            part = ChargedPart(charged, 1.0 / bound, [slice(None)])
            see(Release(client, values.flatten(1), [part]))


def _rows_of(width: int) -> int:
    """Return the number of queries or examples in a release, each with `width` noise values."""
    return max(2, -(-MIN_CLIENT_VALUES // max(1, width)))


PROBES: Mapping[type[Mechanism], type[ReleaseProbe[Any]]] = {
    DpSgdMechanism: StepProbe,
    UpdateRelease: UpdateProbe,
    VoteMechanism: VoteProbe,
    OutputMechanism: ModelProbe,
    InputMechanism: ExampleProbe,
}


def probe_of(release: Mechanism) -> type[ReleaseProbe[Any]]:
    """Return the `ReleaseProbe` class for a mechanism's type, or else for its nearest base class.

    Raises:
        TypeError: the mechanism's type has no entry in `PROBES`.
    """
    probes = [PROBES[kind] for kind in type(release).__mro__ if kind in PROBES]
    if not probes:
        raise TypeError(f"{type(release).__name__} has no probe; add one to PROBES")
    return probes[0]
