"""Ranking of the advice's candidates by their predicted errors, and the choice of the proposal.

A formula approximates the noise of every candidate. The few that are shown have the noise of a
planned run, where this is fast. The proposal is the shortest schedule near the best one in two
values: the mean error over plausible tasks, and the largest factor by which another is better.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsim.accountant.checks import Floats
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.settings import written_name
from fedsim.experiment import ExperimentError, LoadedExperiment, load_experiment
from fedsim.experiment.load import with_clients
from fedsim.federation.assembly import with_plans
from fedsim.federation.federation import Federation
from fedsim.planning.alternatives import privacy_of
from fedsim.server.aggregation.weights import PlanValues, WeightingError, plan_weights
from fedsim.server.settings import WeightingSettings
from fedsim.tools.advice.candidates import (
    FULL,
    RATES,
    AdviceCandidate,
    PublicFacts,
    Rate,
    batch_changes,
    budget_of,
    candidate_grid,
    changes_of,
    public_facts,
)
from fedsim.tools.advice.noise import (
    CYCLIC,
    PLAUSIBLE_TASKS,
    Schedules,
    correlated_candidates,
    mean_errors,
    noise_to_signal,
    sampling_noise_ratio,
    sampling_rates,
    screening_noise,
)

FILE, PROPOSAL = "the file", "proposal"
_NEAR_BEST = 1.1  # candidates within this factor of the best count as equal
_SLACK = 1.0 + 1e-6  # of an ε against the file's, for rounding
_SCHEDULE = ("rounds", "steps", "learning_rate")
_KEPT = {  # what a candidate keeps of the file
    PROPOSAL: (),
    "weights only": ("rate", *_SCHEDULE),
    "sampling rate only": ("weighting", *_SCHEDULE),
    "schedule only": ("weighting", "rate"),
}


@dataclass(frozen=True, eq=False)
class Ranked:
    """A candidate schedule with its predicted error."""

    name: str
    candidate: AdviceCandidate
    changes: Mapping[str, Any]  # `{"key.path": value}`
    sampling_rate: tuple[float, float]  # smallest and largest over clients
    noise_multiplier: tuple[float, float]  # smallest and largest over clients
    all_noise: Floats  # noise multiplier of each client, (K,)
    noise_is_exact: bool  # it is that of a planned run, not of an approximate formula
    noise_to_signal: float  # the geometric mean over plausible tasks
    ratio: float  # `noise_to_signal` over that of the file's schedule
    ratio_range: tuple[float, float]  # smallest and largest over the plausible tasks


def weighting_text(weighting: str | Mapping[str, Any]) -> str:
    """Return the name of a weighting for a table; `examples_over_noise` becomes "n / noise"."""
    name = written_name(weighting)
    return "n / noise" if name == "examples_over_noise" else name


class Ranking:
    """The predicted errors of all candidates of one federation."""

    def __init__(self, federation: Federation) -> None:
        facts = public_facts(federation)
        self._federation, self.facts = federation, facts
        self._weightings = self._usable_weightings()
        rates: list[Rate] = [rate for rate in RATES if self._adds_rate(rate)]
        self.candidates = candidate_grid(facts.given, rates=rates, weightings=self._weightings)
        noise = screening_noise(self.candidates, facts)
        self._task_errors = predicted_errors(self.candidates, noise, facts)
        self.errors = mean_errors(self._task_errors)
        self._file_errors = predicted_errors([facts.given], facts.noise[None], facts)

    def ranked(self) -> list[Ranked]:
        """Return the ranked candidates to show: the file's schedule, the proposal, then others."""
        rows = [self._rank(FILE, self.facts.given, self.facts.noise, exact=True)]
        seen = [self.facts.given]
        for name, candidate in self._finalists():
            if candidate not in seen:
                seen.append(candidate)
                rows += self._finalist(name, candidate)
        return rows + list(self._other_samplings()) + self._correlated()

    def _finalist(self, name: str, candidate: AdviceCandidate) -> list[Ranked]:
        """Return [finalist with the noise of a planned run], or [] if a run would refuse it."""
        loaded = self._load(changes_of(candidate, self.facts))
        if loaded is None:
            return []
        if candidate.rate is None and name != PROPOSAL:  # one noise for each size takes seconds
            noise = screening_noise([candidate], self.facts)[0]
            return [self._rank(name, candidate, noise, exact=False)]
        try:
            planned = with_plans(self._federation, loaded).plan
        except (PrivacyPlanError, WeightingError):
            return []
        plans, terms = planned.clients or (), planned.client_privacy or ()
        for client, epsilon in zip(self.facts.members, self.facts.epsilons, strict=True):
            overspends = plans[client].steps_to_take < plans[client].planned_steps
            if overspends or budget_of(plans[client], terms[client].privacy) > epsilon * _SLACK:
                return []  # noise that is given for a client alone may cost it more
        noise = np.array([plans[k].release.noise_multiplier for k in self.facts.members])
        return [self._rank(name, candidate, noise, exact=True)]

    def _other_samplings(self) -> Iterator[Ranked]:
        """Yield the file's schedule with other sampling schemes, unless batches are full."""
        if bool((self.facts.rates == 1.0).all()):
            return
        used = privacy_of(self.facts.experiment).sampling.name
        for scheme in SAMPLING_SCHEMES.values():
            name, other = scheme.name, replace(self.facts.given, sampling=scheme.name)
            if name in (used, CYCLIC) or self._load(changes_of(other, self.facts)) is None:
                continue  # cyclic batches are for correlated noise
            with suppress(PrivacyPlanError):
                ratio = sampling_noise_ratio(self._federation, self.facts, name)
                yield self._rank(f"{name} batches", other, ratio * self.facts.noise, exact=False)

    def _correlated(self) -> list[Ranked]:
        """Return [the file's schedule with correlated noise of the best number of bands], or []."""
        rows = []
        for candidate, ratio in correlated_candidates(self._federation, self.facts):
            if self._load(changes_of(candidate, self.facts)) is not None:
                name = f"correlated, {candidate.correlation['bands']} bands"
                rows.append(self._rank(name, candidate, ratio * self.facts.noise, exact=False))
        return sorted(rows, key=lambda row: row.noise_to_signal)[:1]

    def _rank(self, name: str, candidate: AdviceCandidate, noise: Floats, *, exact: bool) -> Ranked:
        errors = predicted_errors([candidate], noise[None], self.facts)
        error = mean_errors(errors).item()
        return Ranked(
            name=name,
            candidate=candidate,
            changes=changes_of(candidate, self.facts),
            sampling_rate=_range_of(sampling_rates([candidate], self.facts)),
            noise_multiplier=_range_of(noise),
            all_noise=noise,
            noise_is_exact=exact,
            noise_to_signal=error,
            ratio=error / mean_errors(self._file_errors).item(),
            ratio_range=_range_of(errors / self._file_errors),
        )

    def _finalists(self) -> Iterator[tuple[str, AdviceCandidate]]:
        """Yield (name, candidate): the proposal, single changes, and the best of other kinds."""
        for name, kept in _KEPT.items():
            same = {key: getattr(self.facts.given, key) for key in kept}
            yield name, self._best(lambda c, same=same: same.items() <= vars(c).items())
        for weighting in self._weightings:
            name = f"best with {weighting_text(weighting)}"
            yield name, self._best(lambda c, w=weighting: c.weighting == w)
        yield "best with drawn batches", self._best(lambda c: c.rate not in (None, FULL))

    def _best(self, admitted: Callable[[AdviceCandidate], bool]) -> AdviceCandidate:
        """Return the shortest admitted schedule near the best one, on average and at worst."""
        places = np.flatnonzero([admitted(candidate) for candidate in self.candidates])
        if not places.size:
            return self.facts.given
        near = places[self.errors[places] <= self.errors[places].min() * _NEAR_BEST]
        worst = self._task_errors[:, near] / self._task_errors[:, places].min(axis=1)[:, None]
        regrets = worst.max(axis=0)
        robust = near[regrets <= regrets.min() * _NEAR_BEST]

        def rank(i: int) -> tuple[int, float]:
            return self.candidates[i].local_steps, float(f"{self.errors[i]:.3g}")

        return self.candidates[min(robust, key=rank)]

    def _usable_weightings(self) -> list[Any]:
        """Return the file's weighting, then the other weightings that the file allows."""
        weightings = [self.facts.given.weighting]
        for weighting in ("examples", "examples_over_noise", "uniform"):
            if weighting in weightings or self._load({"federation.weighting": weighting}) is None:
                continue
            with suppress(WeightingError):
                shares_of(weighting, self.facts.noise / self.facts.rates, self.facts)
                weightings.append(weighting)
        return weightings

    def _adds_rate(self, rate: Rate) -> bool:
        if rate == FULL and bool((self.facts.rates == 1.0).all()):
            return False  # the file's batches are full already
        candidate = replace(self.facts.given, rate=rate)
        return self._load(batch_changes(candidate, self.facts)) is not None

    def _load(self, changes: Mapping[str, Any]) -> LoadedExperiment | None:
        content, federation = self.facts.experiment.model_dump(mode="json"), self._federation
        try:
            loaded = load_experiment(content, changes, base=federation.base)
            with_clients(loaded, len(federation.data.clients))  # checks rules on their number
        except ExperimentError:
            return None
        return loaded


def predicted_errors(
    candidates: Sequence[AdviceCandidate], noise: Floats, facts: PublicFacts
) -> Floats:
    """Return noise-to-signal ratios (tasks, candidates), with noise multipliers (candidates, K)."""
    rates, known = sampling_rates(candidates, facts), dict[str, Floats]()
    # What weights depend on; the learning rate does not change them.
    keys = [repr((c.weighting, c.rate, c.local_steps, c.sampling)) for c in candidates]
    for key, c, z, q in zip(keys, candidates, noise, rates, strict=True):
        if key not in known:
            known[key] = shares_of(c.weighting, z / q, facts)
    weights = np.stack([known[key] for key in keys])
    batches = rates * facts.examples
    absent = facts.num_clients / facts.clients_per_round  # fewer clients share the noise
    deviations = noise * facts.clip_norms / facts.clip_norms.mean() / batches
    shares = facts.examples / facts.examples.sum()
    drawn_clients = (absent - 1.0) / facts.num_clients
    schedules = Schedules(
        rounds=np.array([float(c.rounds) for c in candidates]),
        steps=np.array([float(c.steps) for c in candidates]),
        reach=np.array([c.learning_rate * facts.stride for c in candidates]),
        noise=facts.trained_values * absent * np.square(weights * deviations).sum(axis=1),
        sampling=absent * (np.square(weights) * (1.0 - rates) / batches).sum(axis=1)
        + facts.label_skew * drawn_clients,
        weight_skew=np.square(weights - shares).sum(axis=1),
        label_skew=facts.label_skew,
    )
    return np.stack([noise_to_signal(schedules, task) for task in PLAUSIBLE_TASKS])


def _range_of(values: Floats) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def predicted_error(candidate: AdviceCandidate, noise: Floats, facts: PublicFacts) -> float:
    """Return the mean error of a candidate over plausible tasks, with noise multipliers (K,)."""
    return mean_errors(predicted_errors([candidate], noise[None], facts)).item()


def shares_of(weighting: str | Mapping[str, Any], noise: Floats, facts: PublicFacts) -> Floats:
    """Return the clients' shares (K,) in the average; `noise` is z / q, over sampling rates."""
    content = {"name": weighting} if isinstance(weighting, str) else weighting
    settings = WeightingSettings.model_validate(content)
    clients = [PlanValues(int(n), float(z)) for n, z in zip(facts.examples, noise, strict=True)]
    planned = plan_weights(settings, clients, clients_per_round=facts.clients_per_round)
    weights = np.array(planned.values, dtype=np.float64)
    return weights / weights.sum()
