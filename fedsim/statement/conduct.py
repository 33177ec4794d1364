"""Budgets, access to the data, and how to check the ledger."""

import math
from collections.abc import Mapping
from typing import Any

from fedsim.core.formatting import clients_text, count_text, range_text
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence


class TargetsKeptSentence(Sentence):
    """No client spent more than its budget."""

    point, kind, title = "budget", "fact", "Budgets"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee, some client has a target, and all are kept."""
        return facts.is_bounded and bool(_targets(facts)) and not facts.clients_over_target

    @property
    def text(self) -> str:
        """The sentence in words."""
        targets = _targets(self.facts)
        who = "Every client" if len(targets) == len(self.facts.clients) else "Each of them"
        return (
            f"{count_text(len(targets), 'client')} had a target ε of {range_text(targets)}. "
            f"{who} stayed within its target."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The number of clients with a target, and the range of the targets."""
        targets = _targets(self.facts)
        return {"clients": len(targets), "smallest": min(targets), "largest": max(targets)}


class TargetsExceededSentence(Sentence):
    """Some client spent more than its budget."""

    point, kind, title = "budget", "warning", "A budget was exceeded"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a client spent more than its target."""
        return facts.is_private and bool(facts.clients_over_target)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return f"The target ε was exceeded by {clients_text(self.facts.clients_over_target)}."

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients."""
        return {"clients": list(self.facts.clients_over_target)}


class NoTargetsSentence(Sentence):
    """The experiment gave the noise multiplier instead of a target ε."""

    point, kind, title = "budget", "fact", "Budgets"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether no client has a target."""
        return facts.is_private and not _targets(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return "The noise multiplier was given without a target ε: no budget limited the spend."


class WithdrawalsSentence(Sentence):
    """Clients that withdrew because their budget was spent."""

    point, kind, title = "budget", "fact", "Withdrawals"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a private client withdrew."""
        return facts.is_private and bool(facts.withdrawn_clients)

    @property
    def text(self) -> str:
        """The sentence in words."""
        withdrawn = self.facts.withdrawn_clients
        return (
            f"{count_text(len(withdrawn), 'client')} withdrew before the end because the budget "
            f"was spent: {clients_text(withdrawn)}. Budgets depend on settings alone, so a "
            "withdrawal reveals nothing about examples."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients and the rounds in which they withdrew."""
        rounds = {c.client: c.withdrawn_round for c in self.facts.clients}
        return {"rounds": {str(client): rounds[client] for client in self.facts.withdrawn_clients}}


class LostUpdatesSentence(Sentence):
    """Failed clients keep their charges."""

    point, kind, title = "budget", "fact", "Lost updates stay charged"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether an update of a private client was lost."""
        return facts.is_private and facts.run is not None and facts.run.lost_updates > 0

    @property
    def text(self) -> str:
        """The sentence in words."""
        updates = count_text(self.values["updates"], "update")
        return (
            f"{updates} never reached the average. A charge is written before training starts and "
            "is never taken back. Every ε therefore includes each lost update that was charged."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The number of lost updates."""
        return {"updates": self.facts.run.lost_updates if self.facts.run else 0}


class DataAccessSentence(Sentence):
    """The steps of this run that read clients' examples."""

    point, kind, title = "data access", "fact", "Access to private data in this run"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a private federation."""
        return facts.is_private

    @property
    def text(self) -> str:
        """The sentence in words."""
        kind = self.facts.kind
        return (
            f"Clients' examples were read for {kind.reads} only, and {kind.charged} is in the "
            "ledger. "
            "The metrics are those of the global model on the server's test set, which "
            "counts as public. If it is not public, the metrics reveal information about it."
        )


class TuningNotChargedSentence(Sentence):
    """Earlier runs on the same data are not part of this ε."""

    point, kind, title = "limit", "limit", "Tuning runs are not charged"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee and nothing is declared about other runs."""
        return facts.is_bounded and facts.tuning is None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Tuning runs on the same data are not charged: every run spends privacy, and this "
            "account covers one run only."
        )


class TuningDeclaredSentence(Sentence):
    """What the user declared about other runs on the same data."""

    point, kind, title = "data access", "fact", "Tuning, as declared"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether something is declared."""
        return facts.is_private and facts.tuning is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"Declared about other runs on the same data: {_pairs(self.facts.tuning)}. The "
            "declaration is not checked, and no ε here includes it."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The declaration."""
        return dict(self.facts.tuning or {})


class LedgerSentence(Sentence):
    """Where charges are recorded, and the digest of all ledgers."""

    point, kind, title = "recomputation", "fact", "Ledger"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether every private client's ledger has a head."""
        return facts.is_private and facts.digest is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        who = "Each client writes its charge for a round to ledger.jsonl before it trains."
        if self.facts.trust.participation_rate is not None:
            who = "The server writes every client's charge to ledger.jsonl before it adds noise."
        if self.facts.trust.trust == "distributed":
            who += " A record has a ledger for each of the two observers."
        return (
            f"{who} Records are chained by SHA-256. The last hash of a client is its ledger_head; "
            f"the digest of all heads is {self.facts.digest}. In the run directory, "
            "`fedsim verify .` recomputes every ε and every hash."
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
    TargetsExceededSentence,
    TargetsKeptSentence,
    NoTargetsSentence,
    WithdrawalsSentence,
    LostUpdatesSentence,
    DataAccessSentence,
    TuningDeclaredSentence,
    LedgerSentence,
    TuningNotChargedSentence,
)
