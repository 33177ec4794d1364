"""Privacy plan of a client: its mechanism, noise and steps, and how ε follows from its charges."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

from fedsim.accountant import PrivacyLedger, make_accountant
from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency, Event
from fedsim.accountant.sampler_slack import MAX_DRAWS, epsilon_with_slack
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import Mechanism, SumPart
from fedsim.clients.mechanisms.kinds import ReleaseKind
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.sampling import Charges
from fedsim.core.durable import GENESIS
from fedsim.core.errors import ExitCode, InputError
from fedsim.noise.correlated.settings import MinSeparation
from fedsim.protocol.client_spend import ClientSpend

M = TypeVar("M", bound=Mechanism)


class PrivacyPlanError(InputError):
    """Error: no mechanism can satisfy the privacy settings."""


class PrivacyBudgetError(PrivacyPlanError):
    """Error: a privacy budget is too small for the plan; the message says how many steps fit."""

    exit_code = ExitCode.BUDGET_FORBIDS


@dataclass(frozen=True)
class Accounting:
    """How a client's ε is computed from the privacy events that it was charged for.

    Attributes:
        delta: δ at which ε is computed, in (0, 1).
        accountant: the accountant that computes ε.
        adjacency: which data sets are neighbours.
    """

    delta: float
    accountant: AccountantChoice = "pld"
    adjacency: Adjacency = "zero_out"

    @classmethod
    def of(cls, privacy: PrivacySettings, delta: float) -> Self:
        """Return the accounting of a client by its privacy settings, at its δ."""
        return cls(delta, privacy.accounting, privacy.adjacency.name)

    def epsilon(self, charges: Iterable[tuple[Event, int]]) -> float:
        """Return ε of some releases, including the small cost of inexact noise samplers.

        Args:
            charges: pairs (privacy event, number of releases), as one observer sees them.

        Raises:
            UnsupportedEventError: the accountant has no rule for an event.
        """
        return _epsilon(self, tuple(charges))


@lru_cache(maxsize=4096)  # clients of equal size and budget share the result
def _epsilon(accounting: Accounting, charges: tuple[tuple[Event, int], ...]) -> float:
    account = make_accountant(accounting.accountant, adjacency=accounting.adjacency)
    for event, count in charges:
        account.compose(event, count)
    return epsilon_with_slack(account.get_epsilon, accounting.delta)


@dataclass(frozen=True)
class PrivacyPlan:
    """Privacy mechanism and budget of one client for the whole run; a step is one release.

    Attributes:
        release: the mechanism whose releases are charged, the same in every round. A release is a
            step of DP-SGD, the whole update of a round, a trained model, votes, or all noisy
            examples.
        examples: the client's public number of examples, which set the sampling rate; 0 under
            client-level privacy.
        delta: δ of the client's guarantee.
        target_epsilon: the privacy budget ε that is never exceeded, or None without a budget.
        planned_steps: number of steps in all rounds that the client is scheduled for.
        affordable_steps: number of steps that fit into the budget, at most `planned_steps`, or None
            without a budget. It is below `planned_steps` only if the settings give the noise.
        secure_noise: whether batches and noise are drawn from the operating system, not the seed.
        part: number of noise draws in a sum over clients, with distributed or central trust; None
            in local trust, where the client's ε rests on the client's noise alone.
        round_steps: number of releases in a full round.
        charges_itself: whether the client charges the rounds in which it takes part. Otherwise it
            is secret who takes part, and the server charges every client for every round.
    """

    release: Mechanism
    examples: int
    delta: float
    target_epsilon: float | None
    planned_steps: int
    affordable_steps: int | None = None
    secure_noise: bool = False
    part: SumPart | None = None
    round_steps: int = 1
    charges_itself: bool = True

    def charges(self, first_step: int, steps: int) -> Charges:
        """Return the privacy events of further steps from which the client's ε is computed.

        Guarantee: with noisy sums, the events assume the noise of the smallest sum that may be
        opened.

        Args:
            first_step: number of steps that the client took before.
            steps: number of further steps.

        Returns:
            (event, count) pairs, against the adversary that the client's ε assumes.
        """
        return self.release.charges(first_step, steps, noise_factor=self.noise_factor)

    def server_charges(self, first_step: int, steps: int) -> Charges | None:
        """Return the privacy events of further steps against an adversary that sees the uploads.

        Args:
            first_step: number of steps that the client took before.
            steps: number of further steps.

        Returns:
            (event, count) pairs; or None. In local trust the result is None because `charges`
            already assumes this adversary. In central trust it is None because uploads have no
            noise.
        """
        if self.part is None or not self.part.adds_noise:
            return None
        return self.release.charges(first_step, steps)

    def of_round(self, round_number: int) -> "PrivacyPlan":
        """Return the plan for one round. Only plans for votes depend on the round.

        Args:
            round_number: number of the round, from 1.
        """
        release = self.release.of_round(round_number)
        return self if release is self.release else replace(self, release=release)

    def release_as(self, kind: type[M]) -> M:
        """Return the mechanism of the plan, checked to be an instance of the class `kind`.

        Raises:
            TypeError: the client has a mechanism of another class.
        """
        if not isinstance(self.release, kind):
            name = type(self.release).__name__
            raise TypeError(f"the client's mechanism is {name}, and {kind.__name__} is needed")
        return self.release

    @cached_property
    def mechanism_text(self) -> str:
        """Text that describes the mechanism: two plans with equal text have equal mechanisms."""
        return repr(self.release) if self.part is None else repr((self.release, self.part))

    @property
    def noise_factor(self) -> float:
        """Standard deviation of the noise that hides the client, over that of its own release."""
        return 1.0 if self.part is None else self.part.noise_factor

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier from which the client's ε is computed.

        In noisy sums, this is the noise multiplier of the smallest sum that may be opened.
        """
        return self.noise_factor * self.release.noise_multiplier

    @property
    def steps_to_take(self) -> int:
        """Number of steps that the client takes if it answers in all rounds of its schedule."""
        return self.planned_steps if self.affordable_steps is None else self.affordable_steps

    def spend_of(self, client: int, before: ClientSpend | None = None) -> ClientSpend:
        """Return the privacy spend of a client under this plan.

        Args:
            client: number of the client.
            before: the client's spend under another plan, with all charges so far; None before the
                first charge.
        """
        terms: dict[str, Any] = {
            "examples": self.examples,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "sampling_rate": self.release.sampling_rate,
            "target_epsilon": self.target_epsilon,
        }
        if before is not None:
            return before.changed(**terms)
        return ClientSpend(
            client=client,
            rounds=0,
            steps=0,
            round_steps=0,
            ledger=PrivacyLedger(),
            head=GENESIS,
            **terms,
        )


@dataclass(frozen=True)
class PlanRequest:
    """Inputs from which the privacy plan of a client is made.

    Attributes:
        privacy: the client's privacy settings.
        local: the `local` section of the experiment file.
        examples: the client's number of examples.
        planned_rounds: number of rounds that the client is scheduled for.
        planned_steps: number of steps in these rounds; None if every round is a full one.
        parameters: the trained parameters that the client uploads, or None if they are unknown.
        drawn: probability that the client is in each round, if the draw of clients is secret, or
            None if the client is in all rounds.
        separation: bound on the number of the client's rounds, and the least distance between two
            of them; None if rounds are not kept apart.
        problem: further input that some mechanisms need, such as the bounds of an example or the
            ballots of a vote; None if this input is unknown, or not needed.
        kind: properties of the mechanism; None stands for the mechanism that `privacy` selects.
    """

    privacy: PrivacySettings
    local: LocalSettings
    examples: int
    planned_rounds: int
    planned_steps: int | None = None
    parameters: FlatParameters | None = None
    drawn: float | None = None
    separation: MinSeparation | None = None
    problem: object = None
    kind: ReleaseKind | None = None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Privacy plan of a client before its noise multiplier is calibrated.

    Attributes:
        examples: the client's public number of examples, from which δ follows if `delta` is `auto`;
            0 under client-level privacy.
        steps: number of planned releases in all rounds.
        round_steps: number of releases in a full round.
        given: noise multiplier given by the settings, or None if it is calibrated.
        like: the mechanism with an arbitrary noise multiplier; calibration replaces this value
            until the privacy cost fits.
        build: function that takes a noise multiplier and returns the mechanism, for the model if it
            is known.
        charges_itself: whether the client charges its rounds itself; otherwise the server does.
        hint: ending of an error message that says how to lower the cost; may be "".
    """

    examples: int
    steps: int
    round_steps: int = 1
    given: float | None
    like: Mechanism
    build: Callable[[float], Mechanism]
    charges_itself: bool = True
    hint: str = ""


def draft_of_bounded(
    request: PlanRequest, mechanism: Callable[[float], Mechanism], known: Callable[[float], M]
) -> Draft:
    """Return the plan, before noise calibration, of a client with at most one release a round.

    The client's number of examples is public. A client without examples makes no release.

    Args:
        request: the client's settings, schedule and model.
        mechanism: function that takes a noise multiplier and returns the mechanism, for use as long
            as the model is unknown.
        known: function that takes a noise multiplier and returns the mechanism for the model of
            `request`.
    """
    privacy, examples = request.privacy, request.examples

    def build(noise: float) -> Mechanism:
        try:
            release = known(noise) if examples else mechanism(noise)
            if privacy.noise_multiplier is None and request.parameters is not None and examples:
                release = release.with_effective_noise(noise)
        except ValueError as error:
            raise PrivacyPlanError(
                f"privacy.mechanism: {privacy.mechanism.name} cannot be used: {error}"
            ) from error
        return release

    return Draft(
        examples=examples,
        steps=request.planned_rounds if examples else 0,  # nothing to release
        given=privacy.noise_multiplier,
        like=mechanism(1.0),
        build=build,
    )


def delta_of(privacy: PrivacySettings, public_size: int) -> float:
    """Return δ: the given one, or for `auto` the largest power of ten ≤ 1 / (10 · size).

    δ must be well below 1 / size. At 1 / size, publishing one random example is (0, δ)-private.

    Args:
        privacy: the client's privacy settings.
        public_size: number of examples, or number of clients under client-level privacy.
    """
    if privacy.delta != "auto":
        return privacy.delta
    return 10.0 ** -math.ceil(math.log10(10 * max(1, public_size)) - 1e-12)


def check_draws(draws: int) -> None:
    """Check that a client draws no more noise values than the proof of the noise sampler covers.

    Raises:
        PrivacyPlanError: `draws` is above `MAX_DRAWS`.
    """
    if draws > MAX_DRAWS:
        raise PrivacyPlanError(
            f"a client would draw {draws:.3g} values of noise, steps times trained values, and the "
            f"proof covers {MAX_DRAWS:.0e}: plan fewer rounds, or train fewer values"
        )
