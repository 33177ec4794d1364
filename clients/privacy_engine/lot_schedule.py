"""Schedule of an engine's lots: their order, their streams and their charges."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.privacy_engine.outside_lots import OutsideLotError, OutsideLots
from fedsim.clients.privacy_engine.terms import PrivacyTerms
from fedsim.clients.sampling.sampling import Charges, EpochLots, IndependentLots
from fedsim.core.errors import FedsimError
from fedsim.core.streams import KEY_BYTES, Purpose
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise

logger = logging.getLogger(__name__)

_noised_steps: dict[tuple[Any, ...], int] = {}  # last step with noise in this process, by seed


class EpochError(FedsimError, RuntimeError):
    """A step that belongs to no announced pass over shuffled data."""


class BudgetExhaustedError(FedsimError, RuntimeError):
    """All that the noise was calibrated for is spent."""


class EngineStreams:
    """An engine's randomness: one keyed stream for each lot and for each step's noise.

    Streams are keyed by the number of the step, so a resumed engine needs that number alone.

    Args:
        seed: of lots and noise; None: entropy from the operating system.
        secure: whether noise comes from `SecureNoise`, which cannot be repeated.
        noisy: whether z > 0, so that repeated noise would be a leak.

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

    def lot(self, number: int) -> np.random.Generator:
        """Return the stream of lot, or epoch, `number`."""
        return np.random.Generator(np.random.PCG64DXSM(self._sequence(Purpose.SAMPLING, number)))

    def noise(self, step: int) -> NoiseSource:
        """Return the noise of a step."""
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
        """Return the seed; None where the streams come from the operating system."""
        if not self._repeatable:
            return None
        entropy: Any = self._root.entropy
        entropy = int(entropy) if isinstance(entropy, int) else [int(word) for word in entropy]
        return {"entropy": entropy, "spawn_key": [int(key) for key in self._root.spawn_key]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the seed of `state`; without one, the engine keeps its fresh entropy."""
        if state is not None and self._secure is None:
            self._root = np.random.SeedSequence(
                state["entropy"], spawn_key=tuple(state["spawn_key"])
            )
            self._repeatable, self._noise_key = True, None

    def _sequence(self, purpose: Purpose, *numbers: int) -> np.random.SeedSequence:
        key = (*self._root.spawn_key, int(purpose), *numbers)
        return np.random.SeedSequence(self._root.entropy, spawn_key=key)

    def _warn_of_reuse(self, step: int) -> None:
        key = (str(self._root.entropy), self._root.spawn_key)
        if step <= _noised_steps.get(key, -1):
            self._warned = True
            logger.warning(
                "the seed of this privacy engine gave its noise of step %d before in this process; "
                "an observer of both releases can subtract the noise. Restore the engine with "
                "load_state_dict, or give each client and round a seed of its own",
                step,
            )
            return
        _noised_steps[key] = step


@dataclass(frozen=True)
class Lot:
    """A lot that the engine drew: `place` in pass `number`, or the lot of step `number`."""

    indices: np.ndarray
    number: int
    place: int = 0


class LotSchedule:
    """Counts steps and passes, draws lots, and prices steps.

    Guarantee: `charges` counts every event of the sampling before the release that it pays for. A
    pass over shuffled data is charged at its first step; every step is in a pass, and lots of two
    shuffles are never in one pass. Where a target is set, no more events are counted than the
    noise was calibrated for.

    Attributes:
        steps: taken so far.
        outside: lots of the caller's own loader.
    """

    def __init__(self, terms: PrivacyTerms, streams: EngineStreams) -> None:
        self._terms, self._streams = terms, streams
        self.outside = OutsideLots(terms)
        self.steps = 0
        self._passes = 0  # passes over shuffled data so far, the current one included
        self._paid = 0  # passes that were charged: those with a step
        self._place = 0  # lots of the current pass so far
        self._seen = 0  # examples of the current pass so far
        self._own_pass = False  # whether the lots of the current pass are drawn here

    @property
    def steps_paid(self) -> int:
        """Remaining steps of the current pass, which are charged already."""
        sampling = self._terms.sampling
        if not isinstance(sampling, EpochLots) or not self._place:
            return 0
        return sampling.batches - self._place

    def begin_epoch(self) -> None:
        """Start a pass over data shuffled anew: the next step is charged.

        Raises:
            EpochError: the sampling has no passes.
        """
        if not isinstance(self._terms.sampling, EpochLots):
            raise EpochError(
                "begin_epoch() is for sampling='shuffle'; Poisson lots are charged step by step"
            )
        self._begin_pass(own=False)

    def lots(self, num_examples: int, steps: int) -> Iterator[Lot]:
        """Yield the lots of the next `steps` steps; each must be released, in this order.

        Raises:
            ValueError: there are more rows than public examples.
        """
        sampling, most = self._terms.sampling, self._terms.sample_size
        if num_examples > most and self._terms.adjacency != "add_remove":
            raise ValueError(
                f"the data have {num_examples} rows, of sample_size={most}: either rows are no "
                "examples (give (examples, tokens, ...)), or declare the sample_size that they have"
            )
        if isinstance(sampling, IndependentLots):
            for step in range(self.steps, self.steps + steps):
                yield Lot(sampling.lot(num_examples, self._streams.lot(step)), step)
            return
        if not isinstance(sampling, EpochLots):
            raise TypeError(f"no lots are known of {type(sampling).__name__}")
        number, place = self._next_own(sampling.batches)
        divided = sampling.divide(num_examples, self._streams.lot(number))
        for _ in range(steps):
            if place == sampling.batches:
                number, place = number + 1, 0
                divided = sampling.divide(num_examples, self._streams.lot(number))
            yield Lot(divided[place], number, place)
            place += 1

    def charges(self, examples: int, lot: Lot | None, mechanism: DpSgdMechanism) -> Charges:
        """Count one more step and return the events that it costs.

        Args:
            examples: examples in the lot.
            lot: what `lots` yielded for this step; None for a lot from outside.
            mechanism: of the step.

        Raises:
            NotPoissonError: lots from outside that cannot be the Poisson samples they are declared.
            OutsideLotError: a lot that the account cannot cover.
            EpochError: a lot that belongs to no pass, or was drawn for another step.
            BudgetExhaustedError: a pass beyond those that the noise was calibrated for.
        """
        self.outside.check_claim()
        sampling, event = self._terms.sampling, mechanism.event
        if isinstance(sampling, EpochLots):
            self._join_pass(examples, lot, sampling)
            self._place, self._seen = self._place + 1, self._seen + examples
            self.steps += 1
            if self._place > 1:
                return []
            self._paid += 1
            return [(event, 1)]
        if lot is None:
            event = self.outside.event(examples, mechanism)
        elif examples > self._terms.sample_size:  # only under add_remove, with a small sample_size
            raise OutsideLotError(
                f"a lot of {examples} examples, of sample_size={self._terms.sample_size}: rounding "
                "is accounted for in smaller lots only; declare a larger sample_size"
            )
        elif lot.number != self.steps:
            raise EpochError(
                f"the lot drawn for step {lot.number} is used in step {self.steps}; take the lots "
                "of one loop at a time"
            )
        self.steps += 1
        return [(event, 1)]

    def state(self) -> dict[str, Any]:
        """Return the counters to resume from."""
        return {
            "steps": self.steps,
            "passes": self._passes,
            "paid": self._paid,
            "place": self._place,
            "seen": self._seen,
            "own_pass": self._own_pass,
            "outside": self.outside.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`."""
        self.steps, self._paid = int(state["steps"]), int(state["paid"])
        self._passes, self._place = int(state["passes"]), int(state["place"])
        self._seen, self._own_pass = int(state["seen"]), bool(state["own_pass"])
        self.outside.restore(state["outside"])

    def _begin_pass(self, *, own: bool) -> None:
        self._passes, self._place, self._seen, self._own_pass = self._passes + 1, 0, 0, own

    def _next_own(self, batches: int) -> tuple[int, int]:
        """Return pass and place of the next lot to draw here."""
        if self._own_pass and self._place < batches:
            return self._passes, self._place
        return self._passes + 1, 0

    def _join_pass(self, examples: int, lot: Lot | None, sampling: EpochLots) -> None:
        if lot is not None:
            expected = self._next_own(sampling.batches)
            if (lot.number, lot.place) != expected:
                raise EpochError(
                    f"lot {lot.place} of pass {lot.number} is used where lot {expected[1]} of pass "
                    f"{expected[0]} is due; take the lots of one loop at a time"
                )
            if lot.place == 0:
                self._refuse_beyond_plan(sampling)
                self._begin_pass(own=True)
            return
        if not self._passes or self._own_pass or self._place == sampling.batches:
            raise EpochError(
                "this step belongs to no pass over shuffled data: call engine.begin_epoch() "
                "whenever the loader starts again, so that each pass is charged; or take lots from "
                "engine.batches(x, y), which does it for you"
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

    def _refuse_beyond_plan(self, sampling: EpochLots) -> None:
        """Refuse a pass that the calibration did not count, even where earlier ones were short."""
        planned = self._terms.planned_steps
        if planned is not None and self._paid >= sampling.num_events(planned):
            raise BudgetExhaustedError(
                f"the noise was calibrated to target_epsilon={self._terms.target_epsilon:g} for "
                f"{self._paid} passes over the data, and so many have begun; one more would exceed "
                "it. Take all lots of each pass, or make the engine with more epochs"
            )
