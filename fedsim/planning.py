"""What a federation would spend, and what noise it needs, without training it."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from fedsim.accountant import make_accountant
from fedsim.clients.plan import PrivacyPlan, PrivacyPlanError, plan_privacy
from fedsim.clients.settings import LocalSettings, PrivacySettings
from fedsim.experiment import LoadedExperiment
from fedsim.federation import Federation, assemble
from fedsim.privacy_summary import finite_or_none

_POINTS = 12  # of each client's curve
_SAMPLINGS = ("poisson", "balls_and_bins", "shuffle")


@dataclass(frozen=True)
class PlannedClient:
    """What one client will have spent.

    Attributes:
        client: its number.
        examples: the public size that sets its sampling rate.
        sampling_rate: expected share of its examples in a lot.
        noise_multiplier: z, given or calibrated.
        rounds: rounds that it is scheduled for.
        epsilon: after all of them.
        curve: (rounds taken part in, ε), ascending.
    """

    client: int
    examples: int
    sampling_rate: float
    noise_multiplier: float
    rounds: int
    epsilon: float
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Variation:
    """The same federation with one setting changed, for its median client.

    `noise_multiplier` is what the target needs, or the given one; `epsilon` what it spends.
    """

    change: str
    noise_multiplier: float
    epsilon: float


@dataclass(frozen=True)
class Plan:
    """The privacy plan of a federation."""

    delta: float
    target_epsilon: float | None
    clients: tuple[PlannedClient, ...]
    median_client: int
    variations: tuple[Variation, ...]

    @property
    def system_epsilon(self) -> float:
        """The largest planned ε of any client."""
        return max(client.epsilon for client in self.clients)

    def to_json(self) -> dict[str, Any]:
        """Return the plan for a program; an infinite ε is null."""
        return {
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "system_epsilon": finite_or_none(self.system_epsilon),
            "clients": [
                {
                    **{name: value for name, value in vars(client).items() if name != "curve"},
                    "epsilon": finite_or_none(client.epsilon),
                    "curve": [[rounds, finite_or_none(value)] for rounds, value in client.curve],
                }
                for client in self.clients
            ],
            "median_client": self.median_client,
            "variations": [
                {**vars(variation), "epsilon": finite_or_none(variation.epsilon)}
                for variation in self.variations
            ],
        }


def plan_experiment(loaded: LoadedExperiment) -> Plan:
    """Return what the experiment would spend; nothing is trained and no example is looked at.

    Data are loaded, since the clients' sizes set their sampling rates.

    Raises:
        PrivacyPlanError: the experiment has no `privacy` section, or no noise meets its target.
        ValueError: the experiment cannot be assembled (see `assemble`).
    """
    privacy = loaded.experiment.privacy
    if privacy is None:
        raise PrivacyPlanError("there is nothing to plan: the experiment has no privacy section")
    federation = assemble(loaded, ledger=None)
    rounds = federation.participation.planned_rounds()
    plans = federation.plans or ()
    clients = tuple(
        _planned(client, plan, rounds[client], privacy, loaded.experiment.local.steps)
        for client, plan in enumerate(plans)
    )
    middle = median_low(plan.examples for plan in plans)
    median = next(client.client for client in clients if client.examples == middle)
    return Plan(
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        clients=clients,
        median_client=median,
        variations=tuple(
            _variations(federation, privacy.for_client(median), middle, rounds[median])
        ),
    )


def _planned(
    client: int, plan: PrivacyPlan, rounds: int, privacy: PrivacySettings, steps: int
) -> PlannedClient:
    marks = sorted({max(1, round(rounds * k / _POINTS)) for k in range(1, _POINTS + 1)})
    curve = tuple((mark, _epsilon(plan, privacy, mark * steps)) for mark in marks if mark <= rounds)
    return PlannedClient(
        client=client,
        examples=plan.examples,
        sampling_rate=plan.step.sampling.share,
        noise_multiplier=plan.step.noise_multiplier,
        rounds=rounds,
        epsilon=curve[-1][1] if curve else 0.0,
        curve=curve,
    )


def _epsilon(plan: PrivacyPlan, privacy: PrivacySettings, steps: int) -> float:
    accountant = make_accountant(privacy.accountant, adjacency=privacy.adjacency)
    for event, count in plan.step.charges(0, steps):
        accountant.compose(event, count)
    return accountant.get_epsilon(plan.delta)


def _variations(
    federation: Federation, privacy: PrivacySettings, examples: int, rounds: int
) -> Iterator[Variation]:
    """Yield what the median client would need or spend with one setting changed."""
    local = federation.experiment.local
    for change, other_local, other_privacy, other_rounds in _changes(local, privacy, rounds):
        try:
            plan = plan_privacy(
                other_privacy, other_local, examples=examples, planned_rounds=other_rounds
            )
        except PrivacyPlanError:
            continue  # this combination has no guarantee, so there is nothing to compare
        epsilon = _epsilon(plan, other_privacy, other_local.steps * other_rounds)
        yield Variation(change, plan.step.noise_multiplier, epsilon)


def _changes(
    local: LocalSettings, privacy: PrivacySettings, rounds: int
) -> Iterator[tuple[str, LocalSettings, PrivacySettings, int]]:
    yield "as planned", local, privacy, rounds
    for factor, name in ((0.5, "half"), (2, "double")):
        batch = max(1, round(local.batch_size * factor))
        changed = local.model_copy(update={"batch_size": batch})
        yield f"{name} the batch: local.batch_size={batch}", changed, privacy, rounds
    for factor, name in ((0.5, "half"), (2, "double")):
        yield f"{name} the rounds", local, privacy, max(1, round(rounds * factor))
    for sampling in _SAMPLINGS:
        if sampling != privacy.sampling:
            other = privacy.model_copy(update={"sampling": sampling})
            yield f"privacy.sampling={sampling}", local, other, rounds
