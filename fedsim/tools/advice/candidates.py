"""Public facts about a federation, and the candidate schedules that the advice compares.

Guarantee: the facts use no features and no targets of examples, only numbers of examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from fedsim.accountant import calibrate_noise_multiplier
from fedsim.accountant.checks import Floats
from fedsim.clients.local_settings import SgdSettings
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data.settings import DirichletPartition, ShardsPartition
from fedsim.experiment import Experiment
from fedsim.federation.federation import Federation
from fedsim.planning.alternatives import planned_epsilon, privacy_of

FULL: Literal["full"] = "full"
Rate = float | Literal["full"] | None
RATES: tuple[Rate, ...] = (0.1, 0.25, 0.5, FULL)
_ROUNDS = (5, 10, 15, 20, 25, 30, 40, 60, 100, 150, 200, 300, 500, 1000)
_STEPS = (1, 5)
# lr · rounds · steps, the length of the path, over that of the file. A longer path is for a person
# to try who knows the scale of the data.
_PATHS = (0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
_FIGURES = 2  # significant digits of a learning rate
_UNKNOWN_LABEL_SKEW = 0.1  # of a partition that the file does not describe


@dataclass(frozen=True)
class AdviceCandidate:
    """A training schedule that the advice compares with the schedule of the experiment file."""

    rounds: int
    steps: int  # local, per round
    rate: Rate  # sampling rate of all clients; None keeps the batches of the file
    weighting: Any  # value of `federation.weighting`, a name or a mapping
    learning_rate: float
    sampling: str | None = None  # new `privacy.sampling`
    correlation: Any = None  # new `privacy.noise_correlation`

    @property
    def local_steps(self) -> int:
        """Total number of local steps of a client that takes part in every round."""
        return self.rounds * self.steps


@dataclass(frozen=True, eq=False)
class PublicFacts:
    """Public facts about a federation of K training clients, as its experiment file plans it."""

    experiment: Experiment
    examples: Floats  # public number of each client, (K,), as are the next five
    rates: Floats  # sampling rates under the file's settings
    noise: Floats  # planned noise multipliers under the file's settings
    epsilons: Floats  # that each client may spend
    clip_norms: Floats  # C for an example's gradient
    unit_mu: Floats  # Gaussian-DP μ of each budget: one release with noise multiplier 1/μ spends it
    clients_per_round: int  # that train
    given: AdviceCandidate  # of the file; with `local.epochs`, steps are the clients' median
    stride: float  # largest length of a local step at learning rate 1
    trained_values: int  # number of trained parameters
    inputs: int  # features of an example
    outputs: int  # classes, or 1
    label_skew: float  # expected squared distance of clients' label distributions to the mean one
    members: tuple[int, ...]  # numbers of the K training clients
    given_noise_epsilon: float | None  # largest ε of clients whose noise is given, not calibrated

    @property
    def median_place(self) -> int:
        """Index, in arrays of shape (K,), of the client with the median number of examples."""
        return int(np.argsort(self.examples, kind="stable")[self.num_clients // 2])

    @property
    def num_clients(self) -> int:
        """Number of training clients K, the length of the arrays."""
        return self.examples.size


def public_facts(federation: Federation) -> PublicFacts:
    """Return the public facts about a private federation."""
    experiment, data = federation.experiment, federation.data
    every = [terms.privacy for terms in federation.plan.client_privacy or ()]
    planned = federation.plan.clients or ()
    spends = [budget_of(plan, terms) for plan, terms in zip(planned, every, strict=True)]
    members = [client for client, epsilon in enumerate(spends) if epsilon > 0.0]
    clients = [(planned[client], every[client], spends[client]) for client in members]
    clip_norms = np.array([privacy.clip_norm for _, privacy, _ in clients])
    values = sum(p.numel() for p in federation.model.module.parameters() if p.requires_grad)
    given = [epsilon for _, privacy, epsilon in clients if privacy.gives_noise]
    return PublicFacts(
        experiment=experiment,
        examples=np.array([float(plan.examples) for plan, _, _ in clients]),
        rates=np.array([plan.release.sampling_rate for plan, _, _ in clients]),
        noise=np.array([plan.release.noise_multiplier for plan, _, _ in clients]),
        epsilons=np.array([epsilon for _, _, epsilon in clients]),
        clip_norms=clip_norms,
        unit_mu=np.array([_unit_mu(e, plan.delta, privacy) for plan, privacy, e in clients]),
        clients_per_round=min(federation.plan.participation.round_sizes[1], len(members)),
        given=AdviceCandidate(
            rounds=experiment.federation.rounds,
            steps=int(np.median([federation.plan.steps.whole_rounds[k] for k in members])),
            rate=None,
            weighting=experiment.model_dump(mode="json")["federation"]["weighting"],
            learning_rate=experiment.local.optimizer.lr,
        ),
        stride=_stride(federation, float(clip_norms.mean()), values),
        trained_values=values,
        inputs=math.prod(data.test.features.shape[1:]),
        outputs=data.num_classes or 1,
        label_skew=_label_skew(federation),
        members=tuple(members),
        given_noise_epsilon=_rounded_down(max(given)) if given else None,
    )


def budget_of(plan: PrivacyPlan, privacy: PrivacySettings) -> float:
    """Return a client's target ε if its noise or steps are calibrated to it, else its steps' ε."""
    if plan.planned_steps == 0:
        return 0.0
    exhausted = plan.steps_to_take < plan.planned_steps
    if plan.target_epsilon is not None and (not privacy.gives_noise or exhausted):
        return plan.target_epsilon
    return planned_epsilon(plan, privacy, plan.steps_to_take)


def _rounded_down(epsilon: float) -> float:
    """Return ε rounded down to six significant digits."""
    if not 0.0 < epsilon < math.inf:
        return epsilon
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 5)
    return float(f"{math.floor(epsilon / unit) * unit:.6g}")


def _unit_mu(epsilon: float, delta: float, privacy: PrivacySettings) -> float:
    """Return μ = 1/z of a single Gaussian release that spends ε; infinity if ε is infinite."""
    try:
        return 1.0 / calibrate_noise_multiplier(
            target_epsilon=epsilon,
            delta=delta,
            sampling_rate=1.0,
            steps=1,
            accountant=privacy.accounting,
            adjacency=privacy.adjacency.name,
        )
    except ValueError:  # ε is infinite, or so large that next to no noise meets it
        return math.inf


def _stride(federation: Federation, clip_norm: float, trained_values: int) -> float:
    optimizer = federation.experiment.local.optimizer
    if isinstance(optimizer, SgdSettings):
        return clip_norm / (1.0 - optimizer.momentum)
    return math.sqrt(trained_values)  # Adam moves every value by about the learning rate


def _label_skew(federation: Federation) -> float:
    """Return E |p_k − p|² of the clients' label distributions, from the partition scheme alone."""
    partition, classes = federation.experiment.data.partition, federation.data.num_classes or 1
    if isinstance(partition, DirichletPartition):
        return (1.0 - 1.0 / classes) / (1.0 + classes * partition.alpha)
    if isinstance(partition, ShardsPartition):
        return max(0.0, 1.0 / min(classes, partition.classes_per_client) - 1.0 / classes)
    return 0.0 if partition.scheme in ("iid", "quantity") else _UNKNOWN_LABEL_SKEW


def candidate_grid(
    given: AdviceCandidate, *, rates: Sequence[Rate], weightings: Sequence[object]
) -> list[AdviceCandidate]:
    """Return the file's schedule, then all combinations of values, the file's own among them."""
    rounds = sorted({r for r in _ROUNDS if r < given.rounds} | {given.rounds})
    steps = sorted({*_STEPS, given.steps})
    grid = (
        AdviceCandidate(number, local, rate, weighting, lr)
        for number, local, rate, weighting in product(rounds, steps, (None, *rates), weightings)
        for lr in _learning_rates(given, number * local)
    )
    return [given, *(candidate for candidate in grid if candidate != given)]


def _learning_rates(given: AdviceCandidate, steps: int) -> list[float]:
    path = given.learning_rate * given.local_steps
    rates = {float(f"{path * share / steps:.{_FIGURES}g}") for share in _PATHS}
    return sorted(rates | {given.learning_rate})


def changes_of(candidate: AdviceCandidate, facts: PublicFacts) -> dict[str, Any]:
    """Return the settings that a candidate changes, as `{"key.path": value}`."""
    given, experiment = facts.given, facts.experiment
    values = {
        "federation.rounds": (candidate.rounds, given.rounds),
        "federation.weighting": (candidate.weighting, given.weighting),
        "local.steps": (candidate.steps, given.steps),
    }
    changes: dict[str, Any] = {key: new for key, (new, old) in values.items() if new != old}
    if "local.steps" in changes and experiment.local.epochs is not None:
        changes["local.epochs"] = None
    changes |= batch_changes(candidate, facts)
    if candidate.learning_rate != given.learning_rate:
        optimizer = experiment.local.optimizer.model_dump(mode="json", exclude_defaults=True)
        changes["local.optimizer"] = {**optimizer, "lr": candidate.learning_rate}
    if candidate.correlation is not None:
        changes["privacy.noise_correlation"] = candidate.correlation
    if changes and privacy_of(experiment).noise_multiplier is not None:
        # The same ε by calibrated noise: given noise would spend another ε on another schedule.
        changes["privacy.noise_multiplier"] = None
        changes["privacy.target_epsilon"] = facts.given_noise_epsilon
    return changes


def batch_changes(candidate: AdviceCandidate, facts: PublicFacts) -> dict[str, Any]:
    """Return a candidate's changes of the batch size, the sampling scheme and its rate."""
    batch_size, rate = facts.experiment.local.batch_size, candidate.rate
    before, changes, update = privacy_of(facts.experiment).sampling, dict[str, Any](), {}
    if rate == FULL and batch_size != FULL:
        changes["local.batch_size"] = FULL
    elif isinstance(rate, float) and batch_size == FULL:
        changes["local.batch_size"] = max(1, round(rate * float(np.median(facts.examples))))
    if candidate.sampling is not None:
        update["name"] = candidate.sampling
    if rate is not None:
        update["rate"] = None if rate == FULL else rate
    sampling = before.model_copy(update=update)
    if sampling != before:
        written = sampling.model_dump(mode="json")
        changes["privacy.sampling"] = sampling.name if sampling.rate is None else written
    return changes
