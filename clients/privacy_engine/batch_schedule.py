"""Schedule of a privacy engine: the order of its batches, random streams, and privacy events."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.privacy_engine.outside_batches import OutsideBatchError, OutsideBatches
from fedsim.clients.privacy_engine.terms import PrivacyTerms
from fedsim.clients.sampling.sampling import Charges, EpochBatches, IndependentBatches
from fedsim.core.errors import FedsimError
from fedsim.core.streams import KEY_BYTES, Purpose
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise

logger = logging.getLogger(__name__)

_noised_steps: dict[tuple[Any, ...], int] = {}  # seed → its last step with noise in this process


class EpochError(FedsimError, RuntimeError):
    """Error for a step outside the announced passes over shuffled data, or out of order."""


class BudgetExhaustedError(FedsimError, RuntimeError):
    """Error for a step or pass beyond the number for which the noise was calibrated."""


class EngineStreams:
    """Random streams of an engine: one samples each batch, one draws each step's noise.

    A stream depends only on the seed and the step number. A resumed engine needs nothing else.

    Args:
        seed: seed of sampling and noise; None for a seed from the operating system.
        secure: whether noise comes from `SecureNoise`, which never repeats.
        noisy: whether noise is added, so that repeated noise would be a privacy leak.

    Raises:
        ValueError: the seed is negative, not a whole number, or given for secure noise.
    """

    def __init__(
        self, seed: int | np.random.SeedSequence | None, *, secure: bool, noisy: bool
    ) -> None:
        if secure and seed is not None:
            raise ValueError("secure_mode takes no seed: its noise must not be repeatable")
        if isinstance(seed, bool) or (isinstance(seed, int) and seed < 0):
            raise ValueError(f"seed must be a whole number >= 0, got {seed!r}")
        self._repeatable = seed is not None
        self._warned = not noisy
        is_sequence = isinstance(seed, np.random.SeedSequence)
        self._root = seed if is_sequence else np.random.SeedSequence(seed)
        self._secure = SecureNoise() if secure else None
        self._noise_key: bytes | None = None

    def of_batch(self, number: int) -> np.random.Generator:
        """Return the random generator that draws a Poisson batch, or that shuffles an epoch.

        Args:
            number: index of the batch under Poisson sampling; index of the epoch for shuffled data.
        """
        return np.random.Generator(np.random.PCG64DXSM(self._sequence(Purpose.SAMPLING, number)))

    def noise(self, step: int) -> NoiseSource:
        """Return the noise source of the step with the given number."""
        if self._secure is not None:
            return self._secure
        if self._repeatable and not self._warned:
            self._warn_of_reuse(step)
        if self._noise_key is None:
            words = self._sequence(Purpose.NOISE).generate_state(KEY_BYTES // 4)
            self._noise_key = words.astype("<u4").tobytes()
        number = step.to_bytes(8, "little")
        key = hashlib.blake2b(number, key=self._noise_key, digest_size=KEY_BYTES).digest()
        return SeededNoise(key)

    def state(self) -> dict[str, Any] | None:
        """Return the seed, to resume an engine; None if it came from the operating system."""
        if not self._repeatable:
            return None
        entropy: Any = self._root.entropy
        entropy = int(entropy) if isinstance(entropy, int) else [int(word) for word in entropy]
        return {"entropy": entropy, "spawn_key": [int(key) for key in self._root.spawn_key]}

    def restore(self, state: Mapping[str, Any] | None) -> bool:
        """Restore the seed that `state` returned, if there is one; return whether it is restored.

        Secure noise has no seed, so an engine with secure noise keeps its own random numbers.
        """
        if state is None or self._secure is not None:
            return False
        self._root = np.random.SeedSequence(state["entropy"], spawn_key=tuple(state["spawn_key"]))
        self._repeatable, self._noise_key = True, None
        return True

    def _sequence(self, purpose: Purpose, *numbers: int) -> np.random.SeedSequence:
        key = (*self._root.spawn_key, int(purpose), *numbers)
        return np.random.SeedSequence(self._root.entropy, spawn_key=key)

    def _warn_of_reuse(self, step: int) -> None:
        key = (str(self._root.entropy), self._root.spawn_key)
        if step <= _noised_steps.get(key, -1):
            self._warned = True
            logger.warning(
                "the seed of this privacy engine gave its noise of step %d before in this process; "
                "an adversary who sees both releases can subtract the noise. Restore the engine "
                "with load_state_dict, or give each client and round a seed of its own",
                step,
            )
            return
        _noised_steps[key] = step


@dataclass(frozen=True)
class Batch:
    """Batch that the engine drew.

    Attributes:
        indices: indices of the examples in the batch.
        number: number of the step; for shuffled data, number of the pass.
        place: position of the batch in its pass, from 0.
    """

    indices: np.ndarray
    number: int
    place: int = 0


class BatchSchedule:
    """Order in which an engine draws batches, with the privacy events of its steps.

    Guarantee: `charges` counts every privacy event before the release that it pays for. A pass over
    shuffled data is charged at its first step. Every step is in a pass, and batches of two shuffles
    are never in one pass. With a target ε, at most as many events are counted as the noise was
    calibrated for.

    Attributes:
        steps: number of steps taken so far.
        outside: object that checks and charges batches that the engine did not draw.

    Args:
        terms: the engine's public terms.
        streams: the engine's random streams.
    """

    def __init__(self, terms: PrivacyTerms, streams: EngineStreams) -> None:
        self._terms, self._streams = terms, streams
        self.outside = OutsideBatches(terms)
        self.steps = 0
        self._passes = 0  # number of passes over shuffled data, with the current one
        self._paid = 0  # number of charged passes: those with a step
        self._place = 0  # number of batches of the current pass so far
        self._seen = 0  # number of examples of the current pass so far
        self._own_pass = False  # whether the engine draws the batches of the current pass
        self._divided = 0  # number of examples that a pass of its own divides among its batches

    @property
    def steps_paid(self) -> int:
        """Number of steps of the current pass over the data that are charged but not yet taken.

        The value is 0 under Poisson sampling, where each step is charged when it is taken.
        """
        sampling = self._terms.sampling
        if not isinstance(sampling, EpochBatches) or not self._place:
            return 0
        return sampling.batches - self._place

    def begin_epoch(self) -> None:
        """Start a new pass over shuffled data, so that the next step charges it.

        Raises:
            EpochError: the sampling draws batches without passes over the data.
        """
        if not isinstance(self._terms.sampling, EpochBatches):
            raise EpochError(
                "begin_epoch() is for sampling='shuffle'; Poisson samples are charged step by step"
            )
        self._begin_pass(drawn=False)

    def draw_batches(self, num_examples: int, steps: int) -> Iterator[Batch]:
        """Yield the batches of the next `steps` steps; each must be released, in this order.

        Args:
            num_examples: number of examples from which batches are drawn.
            steps: number of batches.

        Raises:
            ValueError: `num_examples` is above the public `sample_size`.
            EpochError: a pass over another number of examples is unfinished.
        """
        sampling, most = self._terms.sampling, self._terms.sample_size
        if num_examples > most and self._terms.adjacency != "add_remove":
            raise ValueError(
                f"the data have {num_examples} rows, of sample_size={most}: either rows are no "
                "examples (give (examples, tokens, ...)), or declare the sample_size that they have"
            )
        if isinstance(sampling, IndependentBatches):
            for step in range(self.steps, self.steps + steps):
                yield Batch(sampling.draw_batch(num_examples, self._streams.of_batch(step)), step)
            return
        if not isinstance(sampling, EpochBatches):
            raise TypeError(f"the engine cannot draw batches by {type(sampling).__name__}")
        number, place = self._next_own(sampling.batches)
        if place and num_examples != self._divided:
            raise EpochError(
                f"the data have {num_examples} rows, and a pass over {self._divided} rows is "
                f"unfinished, so an example could be in two of its batches: take its other "
                f"{sampling.batches - place} batches first"
            )
        self._divided = num_examples
        divided = sampling.divide(num_examples, self._streams.of_batch(number))
        for _ in range(steps):
            if place == sampling.batches:
                number, place = number + 1, 0
                divided = sampling.divide(num_examples, self._streams.of_batch(number))
            yield Batch(divided[place], number, place)
            place += 1

    def charges(self, examples: int, batch: Batch | None, mechanism: DpSgdMechanism) -> Charges:
        """Count one more step and return its privacy events, as (event, count) pairs.

        Args:
            examples: number of examples in the batch.
            batch: the batch that `draw_batches` yielded for this step; None if the batch came from
                another loader.
            mechanism: the DP-SGD mechanism of the step.

        Raises:
            NotPoissonError: batches were declared Poisson samples, but their sizes contradict this.
            OutsideBatchError: the batch has no privacy guarantee.
            EpochError: the batch belongs to no pass over the data, or was drawn for another step.
            BudgetExhaustedError: the noise was not calibrated for one more pass.
        """
        self.outside.check_claim()
        sampling, event = self._terms.sampling, mechanism.event
        if isinstance(sampling, EpochBatches):
            self._join_pass(examples, batch, sampling)
            self._place, self._seen = self._place + 1, self._seen + examples
            self.steps += 1
            if self._place > 1:
                return []
            self._paid += 1
            return [(event, 1)]
        if batch is None:
            event = self.outside.event(examples, mechanism)
        elif examples > self._terms.sample_size:  # only under add_remove, with a small sample_size
            raise OutsideBatchError(
                f"a batch of {examples} examples, of sample_size={self._terms.sample_size}: "
                "rounding is accounted for in smaller batches only; declare a larger sample_size"
            )
        elif batch.number != self.steps:
            raise EpochError(
                f"the batch drawn for step {batch.number} is used in step {self.steps}; use one "
                "loop over batches at a time"
            )
        self.steps += 1
        return [(event, 1)]

    def state(self) -> dict[str, Any]:
        """Return the counts of steps, passes and charges that a resumed engine needs."""
        return {
            "steps": self.steps,
            "passes": self._passes,
            "paid": self._paid,
            "place": self._place,
            "seen": self._seen,
            "own_pass": self._own_pass,
            "divided": self._divided,
            "outside": self.outside.state(),
        }

    def restore(self, state: Mapping[str, Any], *, same_batches: bool) -> None:
        """Restore the counts that `state` returned.

        Args:
            state: the counts.
            same_batches: whether the random streams draw the batches of the engine that stored the
                counts. If not, a pass that it drew ends, as the rest of it is unknown.
        """
        sampling = self._terms.sampling
        self.steps, self._paid = int(state["steps"]), int(state["paid"])
        self._passes, self._place = int(state["passes"]), int(state["place"])
        self._seen, self._own_pass = int(state["seen"]), bool(state["own_pass"])
        self._divided = int(state["divided"])
        if self._own_pass and not same_batches and isinstance(sampling, EpochBatches):
            self._place = sampling.batches
        self.outside.restore(state["outside"])

    def _begin_pass(self, *, drawn: bool) -> None:
        self._passes, self._place, self._seen, self._own_pass = self._passes + 1, 0, 0, drawn

    def _next_own(self, batches: int) -> tuple[int, int]:
        """Return the pass, and the position in it, of the next batch that the engine draws."""
        if self._own_pass and self._place < batches:
            return self._passes, self._place
        return self._passes + 1, 0

    def _join_pass(self, examples: int, batch: Batch | None, sampling: EpochBatches) -> None:
        if batch is not None:
            expected = self._next_own(sampling.batches)
            if (batch.number, batch.place) != expected:
                raise EpochError(
                    f"batch {batch.place} of pass {batch.number} is used where batch {expected[1]} "
                    f"of pass {expected[0]} is due; use one loop over batches at a time"
                )
            if batch.place == 0:
                self._refuse_beyond_plan(sampling)
                self._begin_pass(drawn=True)
            return
        if not self._passes or self._own_pass or self._place == sampling.batches:
            raise EpochError(
                "this step belongs to no pass over shuffled data: call engine.begin_epoch() "
                "whenever the loader starts again, so that each pass is charged; or take batches "
                "from engine.batches(x, y), which does it for you"
            )
        self.outside.check_size(examples)
        if self._seen + examples > self._terms.sample_size:
            raise EpochError(
                f"{self._seen + examples} examples in one pass, of sample_size="
                f"{self._terms.sample_size}: some occur twice. Call engine.begin_epoch() whenever "
                "the loader starts again"
            )
        if self._place == 0:
            self._refuse_beyond_plan(sampling)

    def _refuse_beyond_plan(self, sampling: EpochBatches) -> None:
        """Raise an error if the noise was calibrated for fewer passes, however short they were."""
        planned = self._terms.planned_steps
        if planned is not None and self._paid >= sampling.num_events(planned):
            raise BudgetExhaustedError(
                f"the noise was calibrated to target_epsilon={self._terms.target_epsilon:g} for "
                f"{self._paid} passes over the data, and so many have begun; one more would exceed "
                "it. Use all batches of each pass, or make the engine with more epochs"
            )
