"""The guarantee of a run, or why there is none: exactly one of these sentences holds."""

import math
from collections.abc import Mapping
from typing import Any

from fedsim.core.formatting import clients_text, delta_text, epsilon_text
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence
from fedsim.statement.views import core_text


class NoPrivacySentence(Sentence):
    """A federation without differential privacy."""

    point, kind, title = "guarantee", "warning", "No differential privacy"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether the experiment has no differential privacy."""
        return not facts.is_private

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "This federation ran without differential privacy: anyone who sees a client's updates "
            "may learn anything about its examples."
        )


class InfiniteEpsilonSentence(Sentence):
    """A client without a bound: the federation has none either."""

    point, kind, title = "guarantee", "warning", "ε is infinite"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a client's ε is infinite."""
        return facts.is_private and math.isinf(facts.epsilon)

    @property
    def text(self) -> str:
        """The sentence in words."""
        unbounded = self.facts.unbounded_clients
        who = clients_text(unbounded).capitalize() if unbounded else "Some client"
        return (
            f"{who} released updates with too little noise for any bound: the ε of these updates "
            "is infinite, and so is the federation's. Anyone who sees these updates, or what is "
            "made from them, may learn anything about the examples behind them."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients without a bound."""
        return {"clients": list(self.facts.unbounded_clients)}


class WithheldSentence(Sentence):
    """An ε is reported, but the facts do not support it."""

    point, kind, title = "guarantee", "warning", "No guarantee can be stated"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether an objection stands against the reported ε."""
        return facts.is_private and math.isfinite(facts.epsilon) and bool(facts.objections)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"An ε is reported for this run, but {'; '.join(self.facts.objections)}. No guarantee "
            "is stated; `fedsim verify` checks the run against its ledger."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The objections to the reported ε."""
        return {"objections": list(self.facts.objections)}


class NothingReleasedSentence(Sentence):
    """No client was charged."""

    point, kind, title = "guarantee", "claim", "Nothing was released"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether every account is still empty."""
        return (
            facts.is_private
            and not facts.has_charges
            and math.isfinite(facts.epsilon)
            and not facts.objections
        )

    @property
    def text(self) -> str:
        """The sentence in words."""
        return "No client released an update, so no privacy was spent: ε = 0 for every client."


class _BoundedSentence(Sentence):
    """The common part of both kinds of guarantee."""

    point, kind, title = "guarantee", "claim", "Guarantee"
    noise = ""

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether every client has a finite ε, by noise of this kind."""
        return (
            facts.is_bounded and facts.mechanism is not None and facts.mechanism.noise == cls.noise
        )

    @property
    def largest(self) -> str:
        """The largest ε with its δ, in words."""
        facts = self.facts
        deltas = {client.delta for client in facts.clients}
        at = f"δ = {delta_text(facts.delta)}"
        if len(deltas) > 1:
            at = f"δ ≤ {delta_text(facts.delta)}, each client having a δ of its own"
        return (
            f"The largest ε_k is {epsilon_text(facts.epsilon)} at {at}; it is the guarantee of the "
            "federation."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The pair that holds for every client."""
        return {
            "epsilon": self.facts.epsilon,
            "delta": self.facts.delta,
            "client": self.facts.worst.client,
        }


class GuaranteeSentence(_BoundedSentence):
    """A guarantee of the run itself: its noise cannot be reproduced and removed."""

    noise = "secure"

    @property
    def text(self) -> str:
        """The sentence in words."""
        core = core_text(self.facts)
        return f"{core[0].upper()}{core[1:]}. {self.largest}"


class SimulatedGuaranteeSentence(_BoundedSentence):
    """A guarantee of the simulated mechanism: the noise of this run came from a seed."""

    title = "Guarantee of the simulated mechanism"
    noise = "seeded"

    @property
    def text(self) -> str:
        """The sentence in words."""
        core = core_text(self.facts)
        return f"The mechanism that this run simulates has this guarantee: {core}. {self.largest}"


SENTENCES: tuple[type[Sentence], ...] = (
    NoPrivacySentence,
    InfiniteEpsilonSentence,
    WithheldSentence,
    NothingReleasedSentence,
    SimulatedGuaranteeSentence,
    GuaranteeSentence,
)
