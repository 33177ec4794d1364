"""Noise multipliers of candidates: a closed form for all of them, the run's own plan for a few.

A Poisson-sampled Gaussian of rate q, composed N times, is close to a single Gaussian release with
μ = q √(N (e^(1/z²) − 1)) (Bu, Dong, Long, Su 2020, arXiv:1911.11607, Corollary 5.4). Solved for z,
it is within 3 % of the PLD accountant's noise for the schedules of a few rounds that count here.
At q = 1 the exact √N / μ takes its place. Nothing is promised by these figures: the noise of a
proposal comes from `plan_privacy`, as that of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.mechanisms.client_privacy import resolve_client_privacy
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan, PrivacyPlanError
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings, RenyiAccountantSettings
from fedsim.clients.sampling.schemes import SamplingName
from fedsim.experiment import Experiment
from fedsim.federation.client_plans import read_client_tables
from fedsim.federation.federation import Federation
from fedsim.federation.schedule import participation_of
from fedsim.tools.advice.candidates import FULL, Candidate
from fedsim.tools.advice.facts import PublicFacts

Floats = NDArray[np.float64]


def sampling_rates(candidates: Sequence[Candidate], facts: PublicFacts) -> Floats:
    """Return the sampling rate of each client, (candidates, K)."""
    rows = {None: facts.rates, FULL: np.ones(facts.num_clients)}
    return np.stack(
        [rows[c.rate] if c.rate in rows else np.full(facts.num_clients, c.rate) for c in candidates]
    )


def screening_noise(candidates: Sequence[Candidate], facts: PublicFacts) -> Floats:
    """Return about the noise multiplier of each client, (candidates, K).

    Candidates with the lots of the file are scaled so that the file itself has its planned noise.

    Args:
        candidates: schedules.
        facts: of the federation.
    """
    share = facts.clients_per_round / facts.num_clients
    steps = np.array([[max(1.0, c.local_steps * share)] for c in candidates])
    rates = sampling_rates(candidates, facts)
    noise = _closed_form(steps, rates, facts.unit_mu)
    own = _closed_form(max(1.0, facts.rounds * facts.steps * share), facts.rates, facts.unit_mu)
    same_lots = np.array([[c.rate is None] for c in candidates])
    scale = facts.noise / np.maximum(own, 1e-12)
    return np.where(same_lots & (own > 0.0), noise * scale, noise)


def _closed_form(steps: float | Floats, rates: Floats, unit_mu: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        sampled = 1.0 / np.sqrt(np.log1p(np.square(unit_mu / rates) / steps))
        return np.where(rates == 1.0, np.sqrt(steps) / unit_mu, sampled)


@dataclass(frozen=True)
class PlannedClient:
    """Privacy plan of a client under the settings of a candidate, and those settings."""

    plan: PrivacyPlan
    privacy: PrivacySettings


def planned_clients(experiment: Experiment, federation: Federation) -> tuple[PlannedClient, ...]:
    """Return the privacy plan of each client under other settings, as a run would make it.

    Args:
        experiment: the federation's experiment with the changes of a candidate.
        federation: gives the public sizes and the model.

    Raises:
        PrivacyPlanError: no noise meets a budget.
    """
    privacy = experiment.privacy
    if privacy is None:
        raise PrivacyPlanError("there is nothing to plan: the experiment has no privacy section")
    sizes = federation.data.clients.sizes
    participation = participation_of(experiment, len(sizes))
    rounds = participation.planned_rounds()
    terms = resolve_client_privacy(
        privacy,
        num_clients=len(sizes),
        seed=experiment.seed,
        tables=read_client_tables(privacy, federation.base),
        clients_per_round=participation.round_sizes[1],
    )
    parameters = federation.release_parameters
    return tuple(
        PlannedClient(
            plan_privacy(
                PlanRequest(
                    own.privacy,
                    experiment.local,
                    examples=examples,
                    planned_rounds=planned,
                    parameters=parameters,
                )
            ),
            own.privacy,
        )
        for own, examples, planned in zip(terms, sizes, rounds, strict=True)
    )


def sampling_noise_ratio(
    federation: Federation, facts: PublicFacts, sampling: SamplingName
) -> float:
    """Return about the noise of the median client under another sampling, over that of its own.

    By Rényi DP, whose noise for epochs is found far faster than by the PLD accountant.

    Args:
        federation: of the file.
        facts: of the federation.
        sampling: the other value of `privacy.sampling`.

    Raises:
        PrivacyPlanError: it has no guarantee here.
    """
    place = facts.median_place
    client = int(facts.members[place])
    privacy = (federation.plan.client_privacy or ())[client].privacy
    rounds = federation.plan.participation.planned_rounds()[client]
    own = privacy.accountant
    by_rdp = own if own.name == "rdp" else RenyiAccountantSettings(name="rdp")
    found = []
    for name in (sampling, privacy.sampling.name):
        other = privacy.with_choice("sampling", name=name).model_copy(
            update={
                "accountant": by_rdp,
                "noise_multiplier": None,
                "target_epsilon": float(facts.epsilons[place]),
            }
        )
        plan = plan_privacy(
            PlanRequest(
                other,
                federation.experiment.local,
                examples=int(facts.examples[place]),
                planned_rounds=max(1, rounds),
            )
        )
        found.append(plan.release.noise_multiplier)
    return found[0] / found[1]
