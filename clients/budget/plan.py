"""A client's privacy plan: its settings turned into one mechanism for the whole run."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from fedsim.accountant import Gaussian, PrivacyLedger, UnsupportedEventError, make_accountant
from fedsim.accountant.ledger.journal import GENESIS
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.accountant.search import MOST_NOISE
from fedsim.clients.budget.affordable_steps import affordable_steps
from fedsim.clients.budget.mechanism import Mechanism
from fedsim.clients.budget.noise_search import calibrate_noise
from fedsim.clients.budget.step_clipping import chosen_noise, clipping_of, given_noise
from fedsim.clients.budget.sum_part import SumPart
from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.correlated_noise.correlation import NoiseCorrelation
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.noise_range import NoiseRangeError
from fedsim.clients.dp_sgd.parameters import FlatParameters
from fedsim.clients.perturbation.bounds import BoundedExamples
from fedsim.clients.perturbation.input import InputMechanism
from fedsim.clients.perturbation.output import OutputMechanism
from fedsim.clients.perturbation.problem import ConvexProblem, Descent
from fedsim.clients.sampling.catalog import SAMPLINGS
from fedsim.clients.sampling.independent_lots import PoissonSampling
from fedsim.clients.sampling.sampling import Charges, Sampling
from fedsim.clients.settings import LocalSettings, PrivacySettings
from fedsim.clients.updates.mechanism import UpdateMechanism
from fedsim.core.errors import ExitCode, InputError
from fedsim.protocol.client_spend import ClientSpend


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

    @property
    def step(self) -> DpSgdMechanism:
        """The step of DP-SGD.

        Raises:
            TypeError: the client has another mechanism.
        """
        if not isinstance(self.release, DpSgdMechanism):
            raise TypeError(f"a client with {type(self.release).__name__} takes no DP-SGD steps")
        return self.release

    @property
    def update(self) -> UpdateMechanism | None:
        """The release of a whole update; None where the unit is the example."""
        return self.release if isinstance(self.release, UpdateMechanism) else None

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


def plan_privacy(
    privacy: PrivacySettings,
    local: LocalSettings,
    *,
    examples: int,
    planned_rounds: int,
    planned_steps: int | None = None,
    parameters: FlatParameters | None = None,
    drawn: float | None = None,
    problem: ConvexProblem | BoundedExamples | None = None,
) -> PrivacyPlan:
    """Return the plan of a client with `examples` examples that takes part in `planned_rounds`.

    Where the unit is the client, a round is one release, and `examples` and `local` say nothing.
    Elsewhere, under zero-out and replace-one, the client's public size sets the sampling rate and
    the expected lot. Under add-remove the size is private, and the declared size takes its place.

    Args:
        privacy: the `privacy` section.
        local: the `local` section.
        examples: the client's number of examples.
        planned_rounds: rounds that the client is scheduled for.
        planned_steps: steps over these rounds; None: whole rounds.
        parameters: the model's; with them, the ledger records each group of parameters.
        drawn: probability with which the client is in each of the rounds, where the unit is the
            client and nobody but the server learns who is; None: it is in all of them.
        problem: the convex problem of perturbation output, or the bounds of an example of input;
            None: the plan has no model, as that of a verification.

    Raises:
        PrivacyPlanError: no noise reaches the target ε, the accountant has no rule for the
            sampling under this adjacency, or the clipping does not fit the model or the noise.
    """
    if privacy.unit == "client":
        return _plan_of_updates(privacy, planned_rounds, parameters, drawn)
    if privacy.perturbation != "gradient":
        return _plan_of_perturbation(privacy, local, examples, planned_rounds, parameters, problem)
    public_size = privacy.declared_examples or examples
    sampling, expected_lot = _sampling(privacy, local, max(1, public_size))
    delta = delta_of(privacy, public_size)
    round_steps = _steps_at(local, sampling.sampling_rate)
    if privacy.noise == "secure":
        sampling = sampling.within_rounds(round_steps)
    steps = round_steps * planned_rounds if planned_steps is None else planned_steps
    steps = steps if public_size else 0  # nothing to train on, no step
    correlation = _correlation(privacy, steps)
    if correlation is not None:
        sampling = _spaced(sampling, correlation.bands)
    _check_accountable(privacy, sampling)
    given = given_noise(privacy, expected_lot)
    noise = given
    if noise is None:
        noise = _noise_multiplier(privacy, delta, sampling, max(steps, round_steps), round_steps)
    try:
        step = DpSgdMechanism(
            sampling=sampling,
            clipping=clipping_of(privacy, expected_lot),
            noise_multiplier=noise,
            expected_lot=expected_lot,
            allocation=chosen_noise(privacy)
            if privacy.groups
            else privacy.noise_allocation or "uniform",
            max_physical_batch=local.max_physical_batch,
            largest_lot=_largest_lot(privacy, public_size),
            correlation=correlation,
        )
        if correlation is not None and given is None:
            step = step.with_effective_noise(noise)
    except ValueError as error:
        key = "groups" if privacy.groups else "clipping"
        raise PrivacyPlanError(f"privacy.{key} cannot be used: {error}") from error
    if parameters is not None:
        check_draws(steps * (parameters.size + 1))
        try:
            step = step.for_model(parameters)
            if given is None:
                step = step.with_effective_noise(noise)
        except NoiseRangeError as error:
            raise PrivacyPlanError(f"privacy.max_grad_norm cannot be used: {error}") from error
        except ValueError as error:
            key = "groups" if privacy.groups else "clipping"
            raise PrivacyPlanError(f"privacy.{key} does not fit the model: {error}") from error
    return PrivacyPlan(
        release=step,
        examples=public_size,
        delta=delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=steps,
        affordable_steps=affordable_of(privacy, delta, step, steps),
        secure_noise=privacy.noise == "secure",
        round_steps=round_steps,
    )


def _plan_of_updates(
    privacy: PrivacySettings,
    rounds: int,
    parameters: FlatParameters | None,
    drawn: float | None,
) -> PrivacyPlan:
    """Return the plan of a client that releases its whole update in each of its rounds.

    Raises:
        PrivacyPlanError: as `plan_privacy`.
    """
    rate = 1.0 if drawn is None else drawn
    delta, sampling = delta_of(privacy, 1), PoissonSampling(rate)
    noise = _noise_multiplier(privacy, delta, sampling, max(rounds, 1), 1)
    try:
        update = UpdateMechanism(
            privacy.clip_norm,
            noise,
            count_noise=privacy.clip_count_noise,
            participation_rate=rate,
        )
        if parameters is not None:
            check_draws(rounds * (parameters.size + 1))
            update = update.for_model(parameters.size, parameters.tensors[0].dtype)
            if privacy.noise_multiplier is None:
                update = update.with_effective_noise(noise)
    except ValueError as error:
        raise PrivacyPlanError(f"the release of a client's update fails: {error}") from error
    return PrivacyPlan(
        release=update,
        examples=0,
        delta=delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=rounds,
        affordable_steps=affordable_of(privacy, delta, update, rounds),
        secure_noise=privacy.noise == "secure",
        charges_itself=drawn is None,
    )


def _plan_of_perturbation(
    privacy: PrivacySettings,
    local: LocalSettings,
    examples: int,
    rounds: int,
    parameters: FlatParameters | None,
    problem: ConvexProblem | BoundedExamples | None,
) -> PrivacyPlan:
    """Return the plan of a client that releases trained models, or its noisy examples once.

    Raises:
        PrivacyPlanError: as `plan_privacy`.
    """
    is_output, delta = privacy.perturbation == "output", delta_of(privacy, examples)
    rounds = rounds if examples else 0  # nothing to release
    releases = max(rounds, 1) if is_output else 1
    noise = _noise_multiplier(privacy, delta, PoissonSampling(1.0), releases, 1)
    release = OutputMechanism(noise) if is_output else InputMechanism(noise)
    try:
        if parameters is not None and examples:
            dtype = parameters.tensors[0].dtype
            if isinstance(release, OutputMechanism) and isinstance(problem, ConvexProblem):
                check_draws(rounds * parameters.size)
                steps = whole_round_steps(privacy, local, examples)
                release = release.for_training(_descent(local, steps, examples, problem), dtype)
            elif isinstance(release, InputMechanism) and isinstance(problem, BoundedExamples):
                check_draws(examples * (problem.features + problem.targets))
                release = release.for_examples(problem, dtype)
            if privacy.noise_multiplier is None:
                release = release.with_effective_noise(noise)
    except ValueError as error:
        raise PrivacyPlanError(
            f"privacy.perturbation: {privacy.perturbation} cannot be used: {error}"
        ) from error
    return PrivacyPlan(
        release=release,
        examples=examples,
        delta=delta,
        target_epsilon=privacy.target_epsilon,
        planned_steps=rounds,
        affordable_steps=affordable_of(privacy, delta, release, rounds),
        secure_noise=privacy.noise == "secure",
    )


def _descent(local: LocalSettings, steps: int, examples: int, problem: ConvexProblem) -> Descent:
    """Return the training of a client of a public size."""
    optimizer = local.optimizer
    return Descent(
        problem,
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        steps=steps,
        batch=local.lot(examples),
        examples=examples,
    )


def _sampling(
    privacy: PrivacySettings, local: LocalSettings, public_size: int
) -> tuple[Sampling, float]:
    """Return the sampling and its expected lot; lots of an epoch have at most `batch_size`."""
    rate = privacy.sampling_rate
    batch_size = local.lot(public_size) if rate is None else max(1, round(rate * public_size))
    kind = SAMPLINGS[privacy.sampling]
    sampling, lot = kind.for_client(public_size, batch_size, sampling_rate=rate)
    return sampling, lot


def whole_round_steps(privacy: PrivacySettings | None, local: LocalSettings, examples: int) -> int:
    """Return the local steps of a client in a whole round, from public facts.

    Args:
        privacy: the client's settings; None without privacy, where nothing is kept secret.
        local: the `local` section.
        examples: the client's number of examples.

    Raises:
        PrivacyPlanError: the epochs are more than the largest number of steps.
    """
    if local.steps is not None:
        return local.steps
    if privacy is None:
        size = max(1, examples)
        return _steps_at(local, local.lot(size) / size)
    size = max(1, privacy.declared_examples or examples)
    return _steps_at(local, _sampling(privacy, local, size)[0].sampling_rate)


def _steps_at(local: LocalSettings, rate: float) -> int:
    try:
        return local.steps_at_rate(rate)
    except ValueError as error:
        raise PrivacyPlanError(str(error)) from error


def _correlation(privacy: PrivacySettings, steps: int) -> NoiseCorrelation | None:
    """Return the correlation of a client's noise over its planned steps."""
    settings = privacy.noise_correlation
    if settings == "none" or not steps:
        return None
    return NoiseCorrelation.toeplitz(settings.bands, steps)


def _spaced(sampling: Sampling, bands: int) -> Sampling:
    """Return the sampling with lots of an example at least `bands` steps apart."""
    try:
        return sampling.spaced(bands)
    except ValueError as error:
        raise PrivacyPlanError(
            f"privacy.noise_correlation.bands = {bands} is too much for a client: {error}; set "
            "fewer bands, a smaller local.batch_size, or noise_correlation: none"
        ) from error


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


def _largest_lot(privacy: PrivacySettings, public_size: int) -> int:
    """Return the public number of examples that no lot exceeds."""
    if privacy.adjacency != "add_remove":
        return public_size
    return max(_MOST_EXAMPLES_OVER_DECLARED * public_size, _MOST_EXAMPLES)


def _check_accountable(privacy: PrivacySettings, sampling: Sampling) -> None:
    """Refuse a sampling that the accountant cannot compose, before any release."""
    if privacy.adjacency not in sampling.scheme.adjacencies:
        raise PrivacyPlanError(sampling.scheme.refusal(privacy.adjacency))
    accountant = make_accountant(privacy.accounting, adjacency=privacy.adjacency)
    try:
        accountant.compose(sampling.event(Gaussian(1.0)))
    except UnsupportedEventError as error:
        raise PrivacyPlanError(
            f"accountant {privacy.accountant} cannot account for sampling {privacy.sampling} under "
            f"adjacency {privacy.adjacency}: {error}; use accountant: rdp, or sampling: poisson"
        ) from error


def delta_of(privacy: PrivacySettings, public_size: int) -> float:
    """Return δ: the given one, or for `auto` a power of ten that is at most 1 / (10 · size).

    δ must be well below 1 / size. At 1 / size, publishing one random example is (0, δ)-private.
    """
    if privacy.delta != "auto":
        return privacy.delta
    return 10.0 ** -math.ceil(math.log10(10 * max(1, public_size)) - 1e-12)


def affordable_of(
    privacy: PrivacySettings, delta: float, step: Mechanism, steps: int
) -> int | None:
    """Return how many of the steps the target affords; None without a target.

    Args:
        privacy: the target, the noise, the accountant and the adjacency.
        delta: of the client.
        step: its mechanism.
        steps: planned steps.
    """
    if privacy.target_epsilon is None:
        return None
    if not privacy.gives_noise:
        return steps  # the noise was calibrated to them
    return affordable_steps(
        step,
        steps,
        target_epsilon=privacy.target_epsilon,
        delta=delta,
        accountant=privacy.accounting,
        adjacency=privacy.adjacency,
    )


def _noise_multiplier(
    privacy: PrivacySettings, delta: float, sampling: Sampling, steps: int, local_steps: int
) -> float:
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.target_epsilon is None:
        raise PrivacyPlanError("privacy needs target_epsilon or noise_multiplier")
    try:
        return calibrate_noise(
            sampling,
            steps,
            target_epsilon=privacy.target_epsilon,
            delta=delta,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency,
        )
    except ValueError as error:
        most = DpSgdMechanism(sampling, FlatClipping(1.0), MOST_NOISE, 1.0)
        fit = affordable_steps(
            most,
            steps,
            target_epsilon=privacy.target_epsilon,
            delta=delta,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency,
        )
        if fit < steps:
            raise PrivacyBudgetError(
                f"privacy.target_epsilon = {privacy.target_epsilon:g} at δ = {delta:g} cannot be "
                f"met over {steps} steps: even with noise_multiplier = {MOST_NOISE:g} at most "
                f"{fit} steps fit, which is {fit // local_steps} rounds{_orders_hint(privacy)}"
            ) from error
        hint = _orders_hint(privacy)
        raise PrivacyPlanError(f"privacy.target_epsilon cannot be met: {error}{hint}") from error


def _orders_hint(privacy: PrivacySettings) -> str:
    """Return how few orders limit what a target affords; "" for those of the accountant."""
    if privacy.orders is None:
        return ""
    return f"; the largest of privacy.orders is {max(privacy.orders):g}: add larger ones"


# Under add_remove the number of examples is private. No client may have more than this, so that the
# rounding of its sums has a public bound; see `ClientTask.check_examples`.
_MOST_EXAMPLES_OVER_DECLARED, _MOST_EXAMPLES = 16, 1 << 20
