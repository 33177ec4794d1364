"""Around the mechanism: budgets, what else touched the data, and how to check all of it."""

import math
from collections.abc import Mapping
from typing import Any

from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence, counted, named, span


class TargetsKept(Sentence):
    """No client spent more than its budget."""

    point, kind, title = "budget", "fact", "Budgets"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee, some client has a target, and all are kept."""
        return facts.bounded and bool(_targets(facts)) and not facts.over_target

    @property
    def text(self) -> str:
        """The sentence in words."""
        targets = _targets(self.facts)
        who = "Every client" if len(targets) == len(self.facts.clients) else "Each of them"
        return (
            f"{counted(len(targets), 'client')} had a target ε of {span(targets)}. {who} stayed "
            "within it."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """How many clients have a target, and which."""
        targets = _targets(self.facts)
        return {"clients": len(targets), "smallest": min(targets), "largest": max(targets)}


class TargetsExceeded(Sentence):
    """Some client spent more than its budget."""

    point, kind, title = "budget", "warning", "A budget was exceeded"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether a client spent more than its target."""
        return facts.private and bool(facts.over_target)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return f"More than the target was spent by {named(self.facts.over_target)}."

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients."""
        return {"clients": list(self.facts.over_target)}


class NoTargets(Sentence):
    """Noise was given instead of a budget."""

    point, kind, title = "budget", "fact", "Budgets"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether no client has a target."""
        return facts.private and not _targets(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return "The noise was given and no target was set: nothing limited what could be spent."


class Withdrawals(Sentence):
    """Clients that left because their budget was spent."""

    point, kind, title = "budget", "fact", "Withdrawals"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether a private client withdrew."""
        return facts.private and bool(facts.withdrawn)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"{counted(len(self.facts.withdrawn), 'client')} left before the end because the "
            f"budget was spent: {named(self.facts.withdrawn)}. Budgets depend on settings alone, "
            "so that leaving reveals nothing about examples."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients and the rounds in which they left."""
        left = {c.client: c.withdrawn_round for c in self.facts.clients}
        return {"rounds": {str(client): left[client] for client in self.facts.withdrawn}}


class LostUpdates(Sentence):
    """What failed clients spent stays spent."""

    point, kind, title = "budget", "fact", "Lost updates stay charged"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether an update of a private client was lost."""
        return facts.private and facts.run is not None and facts.run.lost_updates > 0

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"{counted(self.values['updates'], 'update')} never reached the average. A charge is "
            "written before training starts and is never taken back, so every ε includes them "
            "wherever the client had begun."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """How many updates were lost."""
        return {"updates": self.facts.run.lost_updates if self.facts.run else 0}


class DataAccess(Sentence):
    """What in this run touched the examples of clients."""

    point, kind, title = "data access", "fact", "Access to private data in this run"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a private federation."""
        return facts.private

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Clients' examples were read for training only, and every such step is in the ledger. "
            "The metrics are of the global model on the server's test set, which counts as "
            "public: if it is not, the metrics tell about it."
        )


class TuningNotCharged(Sentence):
    """Earlier runs on the same data are not part of this ε."""

    point, kind, title = "limit", "limit", "Tuning runs are not charged"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee and nothing is declared about other runs."""
        return facts.bounded and facts.tuning is None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Tuning runs on the same data are not charged: every run spends privacy, and this "
            "account knows of one run only."
        )


class TuningDeclared(Sentence):
    """What the person who ran it says about earlier runs."""

    point, kind, title = "data access", "fact", "Tuning, as declared"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether something is declared."""
        return facts.private and facts.tuning is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"Declared about other runs on the same data: {_pairs(self.facts.tuning)}. This is "
            "not checked, and no ε here includes it."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The declaration."""
        return dict(self.facts.tuning or {})


class Ledger(Sentence):
    """Where the spend is written, and its fingerprint."""

    point, kind, title = "recomputation", "fact", "Ledger"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether every private client's ledger has a head."""
        return facts.private and facts.digest is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Each client writes its charge for a round to ledger.jsonl before it trains. Records "
            "are chained by SHA-256; the last hash of a client is its ledger_head, and the digest "
            f"over all of them is {self.facts.digest}. In the run directory, `fedsim verify .` "
            "recomputes every ε and every hash."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The digest."""
        return {"digest": self.facts.digest, "command": "fedsim verify ."}


def _targets(facts: Facts) -> list[float]:
    return [
        client.target_epsilon
        for client in facts.clients
        if client.target_epsilon is not None and math.isfinite(client.target_epsilon)
    ]


def _pairs(declared: Mapping[str, object] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (declared or {}).items()) or "no details"


SENTENCES: tuple[type[Sentence], ...] = (
    TargetsExceeded,
    TargetsKept,
    NoTargets,
    Withdrawals,
    LostUpdates,
    DataAccess,
    TuningDeclared,
    Ledger,
    TuningNotCharged,
)
