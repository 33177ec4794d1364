"""Privacy spending of an engine: charges, ε, remaining budget, and the state to resume from."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from fedsim.accountant import Event, PrivacyLedger, make_accountant
from fedsim.accountant.privacy_filter import PrivacyFilter
from fedsim.accountant.sampler_slack import SHARE, epsilon_with_slack, target_without_slack
from fedsim.clients.gradients.per_example import BatchStatistics
from fedsim.clients.privacy_engine.batch_schedule import EngineStreams
from fedsim.clients.privacy_engine.steps import PrivateSteps
from fedsim.clients.privacy_engine.terms import PrivacyTerms

_SCHEMA = 3


class EngineSpending:
    """Base class with an engine's charges, their ε, and the state from which an engine resumes."""

    terms: PrivacyTerms
    _streams: EngineStreams
    _steps: PrivateSteps

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PrivacyEngine cannot be copied or pickled, because the copy would draw the same "
            "noise for other releases, and the noise cancels in their difference; make a new "
            "engine, and continue with state_dict() and load_state_dict() if need be"
        )

    @property
    def steps(self) -> int:
        """Number of steps taken, including those with an empty batch."""
        return self._steps.schedule.steps

    @property
    def ledger(self) -> PrivacyLedger:
        """Copy of the ledger, with all privacy events so far."""
        return PrivacyLedger().merge(self._steps.ledger)

    @property
    def event(self) -> Event:
        """Privacy event of a step, or with sampling="shuffle" of a pass over the data."""
        return self._steps.mechanism.event

    @property
    def private_statistics(self) -> BatchStatistics | None:
        """Private counts of the last batch's examples and unclipped gradients; never send them."""
        return self._steps.private_statistics

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of a step, as given or calibrated.

        The charged `event` also accounts for rounding (docs/explain/proofs.md).
        """
        return self._steps.mechanism.noise_multiplier

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return ε of all charges at δ, by default at `target_delta`.

        Raises:
            NotPoissonError: batches were declared Poisson samples and are not, so ε is unknown.
            UncheckedLossError: `loss.backward()` ran, and `check_isolation` did not check the loss.
            ValueError: δ is not in (0, 1).
        """
        return self.get_privacy_spent(delta)[0]

    def get_privacy_spent(self, delta: float | None = None) -> tuple[float, float | None]:
        """Return (ε, best α): ε of all charges at δ, and the Rényi order that gives it.

        ε includes a small term, because the sampled noise is not exactly Gaussian. The order is
        None with the accountant "pld", before the first charge, or if ε is infinite.

        Raises:
            NotPoissonError: batches were declared Poisson samples and are not, so ε is unknown.
            UncheckedLossError: `loss.backward()` ran, and `check_isolation` did not check the loss.
            ValueError: δ is not in (0, 1).
        """
        self._check_claims()
        terms, delta = self.terms, self._delta(delta)
        account = make_accountant(terms.accountant_choice, adjacency=terms.adjacency)
        self._steps.ledger.compose_into(account)
        epsilon = epsilon_with_slack(account.get_epsilon, delta)
        return epsilon, account.get_privacy_spent(delta * (1.0 - SHARE)).best_order

    def remaining(self, target_epsilon: float, delta: float | None = None) -> int:
        """Return the number of further steps for which ε at δ stays at most `target_epsilon`.

        If the noise is calibrated for a number of steps, the result is at most the number of these
        steps that are left. A value of 10^12 or more means that there is no limit. Further batches
        are assumed to be drawn by the engine. After a batch from another loader that was not
        declared a Poisson sample, all further batches are assumed to be like that batch.

        Args:
            target_epsilon: the privacy budget.
            delta: δ of the budget; None stands for `target_delta`.
        """
        self._check_claims()
        terms, mechanism = self.terms, self._steps.mechanism
        is_amplified = self._steps.schedule.outside.are_amplified
        event = mechanism.event if is_amplified else mechanism.mechanism
        limit, inner_delta = target_without_slack(target_epsilon, self._delta(delta))
        budget = PrivacyFilter(
            limit, inner_delta, accountant=terms.accountant_choice, adjacency=terms.adjacency
        )
        for entry, count in self._steps.ledger.entries:
            budget.record(entry, count)
        if budget.spent > limit:
            return 0
        steps = budget.max_count(event) * (terms.batches_per_epoch if terms.by_epoch else 1)
        steps += self._steps.schedule.steps_paid
        planned = terms.planned_steps
        return steps if planned is None else min(steps, planned - self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which an engine can resume.

        The state has the ledger, all counters, and the seed if one was given, as plain values that
        JSON can store. Counters and seed determine the random streams. Anyone with the seed can
        subtract the noise, so keep the state as private as the data.

        Raises:
            RuntimeError: a batch is unfinished, so its sum has no noise yet.
        """
        steps = self._steps
        if steps.is_open:
            raise RuntimeError(
                "a batch is unfinished: the sum of virtual_step() has no noise yet and must not be "
                "stored; call optimizer.step() first"
            )
        norm = steps.mechanism.clipping.adapted_clip_norm  # None if it is fixed
        return {
            "schema": _SCHEMA,
            "noise_multiplier": self.terms.noise_multiplier,
            "ledger": steps.ledger.to_list(),
            "schedule": steps.schedule.state(),
            "streams": self._streams.state(),
            "clipping": None if norm is None else {"max_grad_norm": norm},
            "losses": asdict(steps.losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state_dict` of an engine that was made with the same arguments.

        Guarantee: with a seed, all further steps are bitwise equal to the steps of that engine. No
        charge of this engine is lost. Without a seed, the other batches of an unfinished pass over
        shuffled data are unknown, so the next batch begins a new pass, which is charged.

        Raises:
            ValueError: the state has another format, or lacks charges that this engine has.
        """
        if state.get("schema") != _SCHEMA:
            raise ValueError(
                f"not the state of this version's privacy engine: schema {state.get('schema')!r}, "
                f"not {_SCHEMA}; train on with the version that wrote it, or from the start"
            )
        steps = self._steps
        ledger, taken = PrivacyLedger.from_list(state["ledger"]), state["schedule"]["steps"]
        ours = steps.schedule.steps
        if steps.is_open or ours > taken or not ledger.starts_with(steps.ledger):
            raise ValueError(
                f"this engine has taken {ours} steps, and the state of {taken} steps does not "
                "contain them; loading it would erase their charges. Load it into a new engine"
            )
        noise = self.terms.noise_multiplier
        if self.terms.planned_steps and state["noise_multiplier"] != noise:
            raise ValueError(
                f"the noise was calibrated to {noise:g} for all planned steps, but the state's "
                f"steps had {state['noise_multiplier']:g}; make the engine with the same arguments"
            )
        if state["clipping"] is None and steps.mechanism.clipping.adapted_clip_norm is not None:
            raise ValueError(
                "the state's clip norm is fixed, and this engine adapts it; make the engine with "
                "the same arguments"
            )
        if state["clipping"] is not None:
            norm = state["clipping"]["max_grad_norm"]
            norm = tuple(norm) if isinstance(norm, list) else norm  # JSON has no tuples
            steps.use_mechanism(steps.mechanism.resume(norm))
        steps.ledger = ledger
        same_batches = self._streams.restore(state["streams"])
        steps.schedule.restore(state["schedule"], same_batches=same_batches)
        steps.losses.restore(state["losses"])

    def _check_claims(self) -> None:
        self._steps.schedule.outside.check_claim()
        self._steps.losses.require()

    def _delta(self, delta: float | None) -> float:
        return self.terms.target_delta if delta is None else delta
