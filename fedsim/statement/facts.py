"""What is known about the privacy of a run. Facts only: what follows from them is for sentences."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedsim.clients.dp_sgd.sampling_schemes import SAMPLING_SCHEMES
from fedsim.statement.profile import Profile

ADJACENCIES = ("zero_out", "add_remove", "replace_one")
ACCOUNTANTS = ("pld", "rdp", "moments")
NOISES = ("seeded", "secure")
CLIPPINGS = ("flat", "per_layer", "automatic", "adaptive")
# A bound is learnt from a noisy count: it and the gradients must be one event in the ledger.
COUNTING_CLIPPINGS = ("adaptive",)

_SAME = 1e-9  # relative: the same accountant on another machine


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """What one client spent, and on what; an ε without a bound is infinite.

    Attributes:
        examples: the public size behind the sampling rate, the client's own or a declared one.
        events: names of the kinds of events in its ledger.
        joint: whether everything in its ledger is a release of several parts together.
        withdrawn_round: the round in which it left because its budget was spent, if it did.
    """

    client: int
    examples: int
    delta: float
    epsilon: float
    noise_multiplier: float
    sampling_rate: float
    rounds: int
    steps: int
    max_grad_norm: float | None = None
    target_epsilon: float | None = None
    events: frozenset[str] = frozenset()
    joint: bool = False
    head: str | None = None
    withdrawn_round: int | None = None

    @property
    def released(self) -> bool:
        """Whether anything was charged to it."""
        return self.rounds > 0

    @property
    def loose_delta(self) -> bool:
        """Whether publishing one of its examples outright would satisfy its δ."""
        return self.examples > 0 and self.delta >= 1 / self.examples


@dataclass(frozen=True, kw_only=True)
class MechanismFacts:
    """How clients were protected; names as in the experiment file, None where not recorded."""

    adjacency: str
    accountant: str
    noise: str | None
    sampling: str | None
    clipping: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What happened around the mechanism.

    Attributes:
        status: completed, stopped, interrupted or failed.
        rounds: finished rounds.
        planned_rounds: rounds that the experiment asked for, where known.
        lost_updates: charged updates that never reached the average.
    """

    status: str
    rounds: int
    planned_rounds: int | None = None
    lost_updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that the privacy statement of a run may speak of.

    Attributes:
        clients: every client of the federation.
        mechanism: None in a federation without differential privacy.
        profile: what the ledger of the client with the largest ε proves; None where it proves
            nothing (no privacy, nothing spent, an infinite ε, a ledger that cannot be read).
        digest: one hash over the ledgers of all clients.
        version: of fedsim, at the time of the run.
        secure_aggregation: what is recorded of it; None where updates went to the server in clear.
        tuning: what is declared about earlier runs on the same data; None: nothing is.
        run: None where only the privacy account is known.
    """

    clients: tuple[ClientFacts, ...]
    mechanism: MechanismFacts | None
    profile: Profile | None = None
    digest: str | None = None
    version: str | None = None
    secure_aggregation: Mapping[str, object] | None = field(default=None, hash=False)
    tuning: Mapping[str, object] | None = field(default=None, hash=False)
    run: RunFacts | None = None

    @property
    def private(self) -> bool:
        """Whether differential privacy was asked for."""
        return self.mechanism is not None

    @cached_property
    def epsilon(self) -> float:
        """The federation's ε: the largest of any client, never an average."""
        return max((client.epsilon for client in self.clients), default=math.inf)

    @cached_property
    def delta(self) -> float:
        """The largest δ of any client: with `epsilon` a pair that holds for every client."""
        return max((client.delta for client in self.clients), default=1.0)

    @cached_property
    def worst(self) -> ClientFacts:
        """The client whose ε is the federation's; the first of several."""
        return max(self.clients, key=lambda client: client.epsilon)

    @cached_property
    def median(self) -> float:
        """The median ε: a statistic, no guarantee."""
        return statistics.median(client.epsilon for client in self.clients)

    @cached_property
    def unbounded(self) -> tuple[int, ...]:
        """The clients without any bound."""
        return tuple(c.client for c in self.clients if not math.isfinite(c.epsilon))

    @cached_property
    def released(self) -> bool:
        """Whether any client was charged for anything."""
        return any(client.released for client in self.clients)

    @cached_property
    def loose_deltas(self) -> tuple[int, ...]:
        """The clients whose δ is not below 1 / examples."""
        return tuple(client.client for client in self.clients if client.loose_delta)

    @cached_property
    def over_target(self) -> tuple[int, ...]:
        """The clients that spent more than their target."""
        return tuple(
            client.client
            for client in self.clients
            if client.target_epsilon is not None and client.epsilon > client.target_epsilon
        )

    @cached_property
    def withdrawn(self) -> tuple[int, ...]:
        """The clients that left because their budget was spent."""
        return tuple(c.client for c in self.clients if c.withdrawn_round is not None)

    @cached_property
    def objections(self) -> tuple[str, ...]:
        """Why no ε may be stated although one is reported; empty where one may."""
        return tuple(_objections(self)) if self.mechanism is not None else ()

    @property
    def bounded(self) -> bool:
        """Whether a finite ε of something that was released may be stated."""
        return (
            self.private and self.released and math.isfinite(self.epsilon) and not self.objections
        )


def _objections(facts: Facts) -> Iterator[str]:
    mechanism = facts.mechanism
    if mechanism is None:
        return
    if mechanism.adjacency not in ADJACENCIES:
        yield f"its adjacency {mechanism.adjacency!r} is not known"
    if mechanism.accountant not in ACCOUNTANTS:
        yield f"its accountant {mechanism.accountant!r} is not known"
    if mechanism.noise not in NOISES:
        yield "it is not recorded where its noise came from"
    if mechanism.clipping is not None and mechanism.clipping not in CLIPPINGS:
        yield f"its clipping {mechanism.clipping!r} is not known"
    if not facts.released:
        return
    # Lots that the ledger holds as another event were not accounted for as they were drawn.
    if (scheme := SAMPLING_SCHEMES.get(mechanism.sampling or "")) is None:
        yield "it is not recorded how its lots were drawn"
    elif mismatched := _mismatched(facts.clients, scheme.event):
        yield (
            f"lots were drawn by {mechanism.sampling}, but the ledger of client {mismatched[0]} "
            f"accounts for {_listed(mismatched[1])}"
        )
    if mechanism.clipping in COUNTING_CLIPPINGS and (uncounted := _uncounted(facts.clients)):
        yield (
            f"the bound of client {uncounted[0]} was learnt from its examples, but its ledger "
            "accounts for gradients alone"
        )
    if math.isfinite(facts.epsilon) and (found := _unproved(facts)):
        yield found


def _mismatched(
    clients: tuple[ClientFacts, ...], expected: str
) -> tuple[int, frozenset[str]] | None:
    for client in clients:
        if client.released and client.events != {expected} and math.isfinite(client.epsilon):
            return client.client, client.events
    return None


def _uncounted(clients: tuple[ClientFacts, ...]) -> tuple[int, ...]:
    """Return the clients that released something, in a ledger without the counts."""
    return tuple(
        one.client
        for one in clients
        if one.released and not one.joint and math.isfinite(one.epsilon)
    )


def _unproved(facts: Facts) -> str | None:
    """Return what is wrong with the ledger behind the largest ε, if anything is."""
    worst, profile = facts.worst, facts.profile
    if not worst.released:
        return None
    if profile is None or profile.client != worst.client:
        return f"the ledger of client {worst.client}, whose ε is the largest, proves nothing"
    if profile.epsilon > worst.epsilon * (1 + _SAME) or profile.delta != worst.delta:
        return f"the ε of client {worst.client} is smaller than what its ledger adds up to"
    return None


def _listed(events: frozenset[str]) -> str:
    return " and ".join(sorted(events)) or "nothing"
