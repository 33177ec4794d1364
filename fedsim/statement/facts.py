"""The recorded facts about a run's privacy, from which the privacy statement is made."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from fedsim.accountant.attack_bound import Profile
from fedsim.accountant.sampler_slack import Slack
from fedsim.clients.mechanisms.conditions import ADJACENCIES, HIDING_PROTOCOLS, Choices, unmet
from fedsim.clients.mechanisms.kinds import ReleaseKind, protects_client
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.formatting import epsilon_text
from fedsim.statement.attack import AttackBound
from fedsim.statement.trust_facts import TrustFacts, trust_objections

ACCOUNTANTS = ("pld", "rdp", "moments")


class ClippingWords(NamedTuple):
    """The words of the statement for one rule of clipping, and for the noise that follows.

    With an adapted bound, the ledger must have count and gradients as one joint event.
    """

    how: str = "clipped to L2 norm C"
    noise: str = "of standard deviation z · C"
    adaptation: str = ""  # how a noisy count adapts the bound, if it does


_OF_GROUPS = "of each group's own standard deviation, together with the effect of z · C"
CLIPPINGS = {  # by the name in `privacy.json`
    "flat": ClippingWords("clipped as a whole to L2 norm C"),
    "per_layer": ClippingWords(
        "clipped layer by layer, to bounds whose squares add up to C²",
        "divided among the layers with the effect of standard deviation z · C",
    ),
    "automatic": ClippingWords("normalised to L2 norm below C"),
    "adaptive": ClippingWords(
        "clipped as a whole to L2 norm C",
        "of standard deviation above z · C",
        " A count of the batch's examples with norm below C, with Gaussian noise, moves C towards "
        "a quantile of the norms for the next step. Sum and count are accounted for as one "
        "Gaussian release with noise multiplier z; C is a function of these releases (Andrew et "
        "al. 2021).",
    ),
    "groups": ClippingWords(
        "clipped by groups of parameters, each to a bound of its own, whose squares add up to C²",
        _OF_GROUPS,
    ),
    "adaptive_groups": ClippingWords(
        "clipped by groups of parameters, each to a bound of its own",
        _OF_GROUPS,
        " In each group a count of the batch's examples with norm within its bound, with Gaussian "
        "noise, moves the bound towards a quantile of the norms for the next step. Sums and counts "
        "of all groups are accounted for as one Gaussian release with noise multiplier z; the "
        "bounds are functions of these releases (Andrew et al. 2021).",
    ),
}

# What may be said of the largest ε; withheld: the recorded facts do not support the reported ε.
Outcome = Literal["no privacy", "infinite", "withheld", "nothing released", "bounded"]

_RELATIVE_TOLERANCE = 1e-9  # difference of one accountant between machines


def spread_of(epsilons: Sequence[float]) -> dict[str, float]:
    """Return the largest, the median and the smallest ε of clients; only `max` is a guarantee."""
    return {"max": max(epsilons), "median": statistics.median(epsilons), "min": min(epsilons)}


def clients_with_large_delta(
    deltas: Sequence[float], examples: Sequence[int], *, protects_clients: bool
) -> tuple[int, ...]:
    """Return the positions of the clients with δ >= 1 / n, before a run and in its statement.

    To publish one of n units, chosen at random, would satisfy such a δ. n is the client's public
    number of examples (0: private), or the number of clients if the unit is the client.
    """
    counts = [len(deltas)] * len(deltas) if protects_clients else examples
    pairs = enumerate(zip(deltas, counts, strict=True))
    return tuple(place for place, (delta, n) in pairs if n > 0 and delta >= 1 / n)


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """The recorded privacy spend of one client.

    `examples` is the public number (true or declared) that sets the sampling rate; it is 0 if the
    privacy unit is the client, as this number is then private. `rho` is ρ of zero-concentrated DP
    of all releases, not counting the noise sampler; ∞ if none is known, or the statement gives
    none.
    """

    client: int
    examples: int
    epsilon: float  # ∞ if no finite ε can be proven
    delta: float = 1.0
    noise_multiplier: float = 0.0
    sampling_rate: float = 1.0
    rounds: int = 0
    steps: int = 0
    max_grad_norm: float | None = None
    target_epsilon: float | None = None
    events: frozenset[str] = frozenset()  # types of events in the ledger
    is_joint: bool = False  # every event releases several values, such as gradients and a count
    is_one_event: bool = False  # a single event covers the whole run
    run_noise: float | None = None  # noise multiplier of that event, if it is Gaussian
    rho: float = math.inf
    withdrawn_round: int | None = None  # when the client's budget was spent

    @property
    def has_charges(self) -> bool:
        """Whether the client was charged for any release."""
        return self.rounds > 0

    @property
    def is_over_target(self) -> bool:
        """Whether the client spent more than its target ε."""
        return self.target_epsilon is not None and self.epsilon > self.target_epsilon


@dataclass(frozen=True, kw_only=True)
class MechanismFacts:
    """The recorded privacy mechanism of all clients, in the words of the experiment file.

    A value that is not recorded is None; without privacy, all values are None. `off_gradients` has
    settings and bounds of a mechanism that adds its noise neither to gradients nor to whole
    updates; it is None for all others.
    """

    adjacency: str | None = None
    accountant: str | None = None
    noise: str | None = None
    sampling: str | None = None
    clipping: str | None = None
    orders: tuple[float, ...] | None = None  # Rényi orders of the experiment file, if it has any
    noise_correlation: Mapping[str, Any] | None = field(default=None, hash=False)
    off_gradients: Mapping[str, Any] | None = field(default=None, hash=False)
    slack: Slack | None = None  # the most that the noise sampler adds to ε and δ of any client
    target_rho: float | None = None  # ρ of zCDP to which the noise was calibrated, if it was

    @property
    def clip_words(self) -> ClippingWords:
        """The words for the clipping, also for one that is not recorded or not known."""
        return CLIPPINGS.get(self.clipping or "", ClippingWords())


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about how a run ended."""

    status: str = "completed"  # or stopped, interrupted, failed
    rounds: int = 0
    planned_rounds: int | None = None
    lost_updates: int = 0  # charged or not, that never reached the average of a round
    absent_clients: tuple[int, ...] = ()  # that failed, and no update of which reached an average


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All recorded facts from which the privacy statement of a run is made.

    Each client's ε holds against the adversary of `trust`. In distributed trust, `against_server`
    has the facts of the same run against a server that sees single uploads. `profile` and `attack`
    are None without privacy or charges, if an ε is infinite, or if a ledger cannot be read.
    `public_parts` has fixed features, initial weights and frozen parameters of the model, and
    constants of table columns (such as ranges) that were read from the rows.
    """

    clients: tuple[ClientFacts, ...]
    mechanism: MechanismFacts = MechanismFacts()
    trust: TrustFacts = field(default_factory=TrustFacts)
    against_server: "Facts | None" = None
    profile: Profile | None = None  # of the client with the largest ε
    attack: AttackBound | None = None  # on any client
    digest: str | None = None  # over the ledgers of all clients
    version: str | None = None  # of the fedsim that began the run
    secure_aggregation: Mapping[str, Any] | None = field(default=None, hash=False)
    personal_models: str | None = None  # the method by which clients make them
    public_parts: Mapping[str, Any] | None = field(default=None, hash=False)
    run: RunFacts = RunFacts()

    @property
    def is_private(self) -> bool:
        """Whether the experiment has differential privacy; a client's ε may still be infinite."""
        return self.mechanism.accountant is not None

    @cached_property
    def epsilon(self) -> float:
        """The federation's ε: the largest ε of any client, never an average."""
        return max((client.epsilon for client in self.clients), default=math.inf)

    @cached_property
    def delta(self) -> float:
        """The largest δ of any client; the pair (`epsilon`, `delta`) holds for every client."""
        return max((client.delta for client in self.clients), default=1.0)

    @cached_property
    def worst(self) -> ClientFacts:
        """The client with the largest ε; the first one if several have it."""
        return max(self.clients, key=lambda client: client.epsilon)

    @cached_property
    def worst_clients(self) -> tuple[int, ...]:
        """Numbers of the clients whose ε, as printed, is the largest one."""
        largest = epsilon_text(self.epsilon)
        return tuple(c.client for c in self.clients if epsilon_text(c.epsilon) == largest)

    @cached_property
    def unbounded_clients(self) -> tuple[int, ...]:
        """Numbers of the clients with an infinite ε."""
        return tuple(c.client for c in self.clients if not math.isfinite(c.epsilon))

    @cached_property
    def has_charges(self) -> bool:
        """Whether any client was charged for a release."""
        return any(client.has_charges for client in self.clients)

    @cached_property
    def clients_with_large_delta(self) -> tuple[int, ...]:
        """Numbers of the clients with δ >= 1 / n, for n examples, or n clients under that unit."""
        places = clients_with_large_delta(
            [client.delta for client in self.clients],
            [client.examples for client in self.clients],
            protects_clients=self.protects_clients,
        )
        return tuple(self.clients[place].client for place in places)

    @property
    def has_constants_from_rows(self) -> bool:
        """Whether column ranges or other constants of a table were read from private rows."""
        return self.is_private and "constants" in (self.public_parts or {})

    @cached_property
    def choices(self) -> Choices:
        """The recorded settings that decide which privacy theorems apply."""
        mechanism, trust, secure = self.mechanism, self.trust, self.secure_aggregation
        names = ("adjacency", "sampling", "clipping", "noise") if self.is_private else ()
        choices: dict[str, Any] = {name: getattr(mechanism, name) for name in names}
        if mechanism.noise_correlation is not None:
            choices["correlation"] = str(mechanism.noise_correlation.get("name"))
        if mechanism.off_gradients is not None:
            choices["mechanism"] = str(mechanism.off_gradients.get("name"))
        return Choices(
            trust=trust.trust,
            unit=trust.unit,
            votes=self.counts_votes,
            local_steps=trust.local_steps,
            optimizer=trust.optimizer,
            draws_clients=trust.participation_rate is not None,
            protocol=None if secure is None else str(secure.get("protocol")),
            **choices,
        )

    @cached_property
    def kind(self) -> ReleaseKind:
        """What clients release, such as noisy gradients or votes; `NO_RELEASE` if not known."""
        return self.choices.kind

    @property
    def counts_votes(self) -> bool:
        """Whether clients send votes of teachers on public queries instead of updates."""
        return self.trust.votes is not None

    @property
    def protects_clients(self) -> bool:
        """Whether the privacy unit is the client (all of its data) instead of one example."""
        return self.kind.protects_client

    @property
    def sizes_are_declared(self) -> bool:
        """Whether `ClientFacts.examples` are declared numbers, as the true numbers are private."""
        return self.mechanism.adjacency == "add_remove"

    @property
    def hides_updates(self) -> bool:
        """Whether secure aggregation hid single updates from the server."""
        return (self.secure_aggregation or {}).get("protocol") in HIDING_PROTOCOLS

    @cached_property
    def clients_over_target(self) -> tuple[int, ...]:
        """Numbers of the clients that spent more than their target ε."""
        return tuple(c.client for c in self.clients if c.is_over_target)

    @cached_property
    def withdrawn_clients(self) -> tuple[int, ...]:
        """Numbers of the clients that withdrew because their privacy budget was spent."""
        return tuple(c.client for c in self.clients if c.withdrawn_round is not None)

    @cached_property
    def objections(self) -> tuple[str, ...]:
        """Reasons why the reported ε must not be stated; empty if this ε may be stated."""
        return tuple(_objections(self)) if self.is_private else ()

    @cached_property
    def outcome(self) -> Outcome:
        """What may be said of the largest ε: statement, report and terminal all ask here."""
        if not self.is_private:
            return "no privacy"
        if not math.isfinite(self.epsilon):
            return "infinite"
        if self.objections:
            return "withheld"
        return "bounded" if self.has_charges else "nothing released"

    @property
    def is_bounded(self) -> bool:
        """Whether clients were charged and a finite ε may be stated for them."""
        return self.outcome == "bounded"


def _objections(facts: Facts) -> Iterator[str]:
    mechanism, charged = facts.mechanism, [c for c in facts.clients if c.has_charges]
    if mechanism.adjacency not in ADJACENCIES:
        yield f"its adjacency {mechanism.adjacency!r} is not known"
    if mechanism.accountant not in ACCOUNTANTS:
        yield f"its accountant {mechanism.accountant!r} is not known"
    if mechanism.orders is not None and mechanism.accountant != "rdp":
        yield f"its accountant {mechanism.accountant!r} has no orders"
    if mechanism.noise not in ("seeded", "secure"):
        yield "the source of its noise is not recorded"
    if mechanism.slack is None and math.isfinite(facts.epsilon):
        yield "the slack of its sampler of noise is not recorded"
    if mechanism.clipping is not None and mechanism.clipping not in CLIPPINGS:
        yield f"its clipping {mechanism.clipping!r} is not known"
    yield from unmet(facts.choices).values()
    yield from trust_objections(facts.trust, facts.secure_aggregation)
    if not charged:
        return
    yield from _objections_to_events(facts, mechanism)
    if mechanism.noise_correlation is not None:
        single = [client.client for client in charged if not client.is_one_event]
        if single:
            yield (
                f"noise is correlated over the run, but the ledger of client {single[0]} does not "
                "account for the run as one event"
            )
        if facts.protects_clients:
            yield from _objections_to_rounds(facts, mechanism.noise_correlation)
    if (target := mechanism.target_rho) is not None:
        above = [c.client for c in facts.clients if c.rho > target * (1.0 + _RELATIVE_TOLERANCE)]
        if above:
            yield f"the ledger of client {above[0]} has a ρ above its target, {target:g}"
    uncounted = [c.client for c in charged if not c.is_joint and math.isfinite(c.epsilon)]
    if mechanism.clip_words.adaptation and uncounted:
        yield (
            f"the clipping bound of client {uncounted[0]} was adapted to its examples, but its "
            "ledger accounts for gradients alone"
        )
    if math.isfinite(facts.epsilon):
        yield from _unproved(facts)


def _objections_to_rounds(facts: Facts, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield an objection where correlated noise of rounds is not charged as `recorded` says."""
    numbers: list[Any] = [recorded.get(key) for key in ("rounds", "rounds_apart", "max_rounds")]
    most, sensitivity = numbers[-1], recorded.get("sensitivity")
    if not all(isinstance(number, int) for number in numbers) or not isinstance(sensitivity, float):
        yield "the participation that its correlated noise is charged for is not recorded"
        return
    for client in facts.clients:
        limit = client.noise_multiplier * (1.0 + 10.0 * _RELATIVE_TOLERANCE)  # nine digits are kept
        if client.rounds > most:
            yield f"client {client.client} was in {client.rounds} rounds, and {most} are charged"
            return
        if (client.run_noise or 0.0) * sensitivity > limit:
            yield (
                f"the ledger of client {client.client} claims more noise than its noise multiplier "
                "over the sensitivity of correlated noise"
            )
            return


def _objections_to_events(facts: Facts, mechanism: MechanismFacts) -> Iterator[str]:
    """Yield an objection to each charged event that does not fit the sampling of the run."""
    scheme = SAMPLING_SCHEMES.get(mechanism.sampling or "")
    if scheme is None and facts.kind.draws_batches:
        yield "the sampling of its batches is not recorded"
        return
    drawn = facts.trust.participation_rate is not None
    if mechanism.off_gradients is not None or facts.kind.events:
        expected = facts.kind.events
    elif not protects_client(facts.trust.unit):
        expected = frozenset() if scheme is None else frozenset({scheme.event})
    else:
        expected = frozenset({"PoissonSampled"} if drawn else {"Gaussian", "JointGaussian"})
    for client in facts.clients:
        is_right = client.events and client.events <= expected  # no event at all is not
        if is_right or not client.has_charges or not math.isfinite(client.epsilon):
            continue
        accounts = f"the ledger of client {client.client} accounts for "
        accounts += " and ".join(sorted(client.events)) or "nothing"
        if mechanism.off_gradients is not None:
            yield f"{accounts}, which {mechanism.off_gradients.get('name')} does not release"
        elif facts.protects_clients:
            yield f"clients were drawn by {'poisson' if drawn else 'the schedule'}, but {accounts}"
        else:
            yield f"batches were drawn by {mechanism.sampling}, but {accounts}"
        return


def _unproved(facts: Facts) -> Iterator[str]:
    """Yield an objection if the ledger behind the largest ε does not prove this ε."""
    worst, profile = facts.worst, facts.profile
    if not worst.has_charges:
        return
    most = worst.epsilon * (1 + _RELATIVE_TOLERANCE)
    if profile is None or profile.client != worst.client:
        yield f"the ledger of client {worst.client}, whose ε is the largest, proves nothing"
    elif profile.epsilon > most or profile.delta != worst.delta:
        yield f"the ε of client {worst.client} is smaller than the ε of its ledger"
