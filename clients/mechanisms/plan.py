"""A client's privacy plan: its settings turned into one mechanism for the whole run."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import Mechanism, SumPart
from fedsim.clients.mechanisms.kinds import ReleaseKind
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.sampling import Charges
from fedsim.core.durable import GENESIS
from fedsim.core.errors import ExitCode, InputError
from fedsim.protocol.client_spend import ClientSpend

M = TypeVar("M", bound=Mechanism)


class PrivacyPlanError(InputError):
    """Privacy settings that no mechanism can meet."""


class PrivacyBudgetError(PrivacyPlanError):
    """A privacy budget forbids the plan; the message names what it affords."""

    exit_code = ExitCode.BUDGET_FORBIDS


@dataclass(frozen=True)
class PrivacyPlan:
    """One client's mechanism and its budget for the whole run.

    Attributes:
        release: what is charged, the same in every round: a step of DP-SGD, the whole update of a
            round where the unit is the client, a trained model, or all noisy examples.
        examples: the public client size that set the sampling rate; 0 where the unit is the client.
        delta: δ of the client's guarantee.
        target_epsilon: ε that is never exceeded; None without a budget.
        planned_steps: steps over all rounds the client is scheduled for.
        affordable_steps: number of steps that the target affords, at most `planned_steps`; None
            without a target. Fewer than planned only under a given noise multiplier.
        secure_noise: lots and noise come from the operating system instead of the seed.
        part: the client's part of noisy sums, with distributed or central trust; None: the client
            alone adds the noise of its claim.
        round_steps: releases of a whole round, where the budget affords all of them.
        charges_itself: whether the client charges its rounds; else the server charges every client
            for every round, as who takes part is secret.
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
        """Return (event, count) for steps, in the view that the client's ε is claimed for.

        Guarantee: with a part of a sum, the noise is that of the smallest sum that may be opened.

        Args:
            first_step: steps that the client took before.
            steps: number of further steps.
        """
        factor = 1.0 if self.part is None else self.part.noise_factor
        return self.release.charges(first_step, steps, noise_factor=factor)

    def server_charges(self, first_step: int, steps: int) -> Charges | None:
        """Return (event, count) for steps against whoever sees the client's own uploads.

        None where that is the claimed view (local trust), or no noise protects from it (central).

        Args:
            first_step: as `charges`.
            steps: as `charges`.
        """
        if self.part is None or not self.part.adds_noise:
            return None
        return self.release.charges(first_step, steps)

    def of_round(self, round_number: int) -> "PrivacyPlan":
        """Return the plan as it is charged in one round: ballots alternate, all else stays.

        Args:
            round_number: the round, from 1.
        """
        release = self.release.of_round(round_number)
        return self if release is self.release else replace(self, release=release)

    def release_as(self, kind: type[M]) -> M:
        """Return the release, which must be of a kind.

        Raises:
            TypeError: the client has another release.
        """
        if not isinstance(self.release, kind):
            found = type(self.release).__name__
            raise TypeError(f"a client releases by {found}, and {kind.__name__} was asked for")
        return self.release

    @cached_property
    def mechanism_text(self) -> str:
        """The release and its part of a sum as text: equal for equal releases."""
        return repr(self.release) if self.part is None else repr((self.release, self.part))

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier z in the view that the client's ε is claimed for."""
        factor = 1.0 if self.part is None else self.part.noise_factor
        return factor * self.release.noise_multiplier

    @property
    def steps_to_take(self) -> int:
        """Steps that the client will take if it answers every round it is scheduled for."""
        return self.planned_steps if self.affordable_steps is None else self.affordable_steps

    def initial_spend(self, client: int) -> ClientSpend:
        """Return the spend of a client with this plan before its first charge."""
        return ClientSpend(
            client=client,
            examples=self.examples,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            sampling_rate=self.release.sampling_rate,
            target_epsilon=self.target_epsilon,
            rounds=0,
            steps=0,
            round_steps=0,
            ledger=PrivacyLedger(),
            head=GENESIS,
        )


@dataclass(frozen=True)
class PlanRequest:
    """What the plan of a client follows from.

    Attributes:
        privacy: the client's settings.
        local: the `local` section.
        examples: the client's number of examples.
        planned_rounds: rounds that the client is scheduled for.
        planned_steps: steps over these rounds; None: whole rounds.
        parameters: of what the client sends; None: not known.
        drawn: probability with which the client is in each round, where who is drawn stays secret;
            None: it is in all of them.
        problem: what the kind needs beside settings, such as the bounds of an example or the
            ballots of a vote; None: not known, or it needs nothing.
        kind: of the releases; None: as the settings say.
    """

    privacy: PrivacySettings
    local: LocalSettings
    examples: int
    planned_rounds: int
    planned_steps: int | None = None
    parameters: FlatParameters | None = None
    drawn: float | None = None
    problem: object = None
    kind: ReleaseKind | None = None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A private release before its noise is known: what planning needs of its kind.

    Attributes:
        public_size: what δ follows from, where it is `auto`.
        examples: the public client size; 0 where the unit is the client.
        steps: planned releases over all rounds.
        round_steps: releases of a whole round.
        given: noise multiplier of the settings; None: it is calibrated.
        like: a release of any noise that is charged as this one, for a search of the noise.
        build: returns the release with a noise multiplier, of the model where that is known.
        charges_itself: as in `PrivacyPlan`.
        hint: how to lower the cost, for an error; "" where there is nothing to say.
    """

    public_size: int
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
    """Return the draft of a client with a public size that releases at most once a round.

    Args:
        request: its settings, its schedule and its model.
        mechanism: returns the release with a noise multiplier, of an unknown model.
        known: the same of the request's model, with its grid.
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
        public_size=examples,
        examples=examples,
        steps=request.planned_rounds if examples else 0,  # nothing to release
        given=privacy.noise_multiplier,
        like=mechanism(1.0),
        build=build,
    )


def delta_of(privacy: PrivacySettings, public_size: int) -> float:
    """Return δ: the given one, or for `auto` a power of ten that is at most 1 / (10 · size).

    δ must be well below 1 / size. At 1 / size, publishing one random example is (0, δ)-private.
    """
    if privacy.delta != "auto":
        return privacy.delta
    return 10.0 ** -math.ceil(math.log10(10 * max(1, public_size)) - 1e-12)


def check_draws(draws: int) -> None:
    """Refuse a plan that draws more values of noise than the slack of the sampler covers.

    Raises:
        PrivacyPlanError: it does.
    """
    if draws > MAX_DRAWS:
        raise PrivacyPlanError(
            f"a client would draw {draws:.3g} values of noise, steps times trained values, and the "
            f"proof covers {MAX_DRAWS:.0e}: plan fewer rounds, or train fewer values"
        )
