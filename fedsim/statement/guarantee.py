"""Whether anything is guaranteed, and what: exactly one of these sentences holds of any run."""

import math
from collections.abc import Mapping
from typing import Any

from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence, named

_CORE = (
    "against a server that sees every update, the updates of each client k are "
    "(ε_k, δ)-differentially private for its single training examples over all rounds that it took "
    "part in"
)


class NoPrivacy(Sentence):
    """A federation that asked for no privacy."""

    point, kind, title = "guarantee", "warning", "No differential privacy"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether no privacy was asked for."""
        return not facts.private

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "This federation ran without differential privacy: whoever sees a client's updates may "
            "learn anything about its examples."
        )


class InfiniteEpsilon(Sentence):
    """Some client has no bound, so the federation has none."""

    point, kind, title = "guarantee", "warning", "ε is infinite"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether a client's ε is infinite."""
        return facts.private and math.isinf(facts.epsilon)

    @property
    def text(self) -> str:
        """The sentence in words."""
        unbounded = self.facts.unbounded
        who = named(unbounded).capitalize() if unbounded else "Some client"
        return (
            f"{who} released updates without enough noise for any bound: the ε there is infinite, "
            "and so is the federation's. Whoever sees these updates may learn anything about the "
            "examples behind them."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients without a bound."""
        return {"clients": list(self.facts.unbounded)}


class Withheld(Sentence):
    """An ε is reported, but the facts do not support it."""

    point, kind, title = "guarantee", "warning", "No guarantee can be stated"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether something stands against the reported ε."""
        return facts.private and math.isfinite(facts.epsilon) and bool(facts.objections)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"An ε is reported for this run, but {'; '.join(self.facts.objections)}. Nothing is "
            "claimed; fedsim verify checks the run against its ledger."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """What stands against it."""
        return {"objections": list(self.facts.objections)}


class NothingReleased(Sentence):
    """No client was charged for anything."""

    point, kind, title = "guarantee", "claim", "Nothing was released"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether every account is still empty."""
        return (
            facts.private
            and not facts.released
            and math.isfinite(facts.epsilon)
            and not facts.objections
        )

    @property
    def text(self) -> str:
        """The sentence in words."""
        return "No client released an update, so no privacy was spent: ε = 0 for every client."


class _Bounded(Sentence):
    """What both kinds of guarantee have in common."""

    point, kind, title = "guarantee", "claim", "Guarantee"
    noise = ""

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether every client is bounded, by noise of this kind."""
        return facts.bounded and facts.mechanism is not None and facts.mechanism.noise == cls.noise

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


class Guarantee(_Bounded):
    """A guarantee of what really ran, with noise that nobody can take off."""

    noise = "secure"

    @property
    def text(self) -> str:
        """The sentence in words."""
        return f"{_CORE[0].upper()}{_CORE[1:]}. {self.largest}"


class SimulatedGuarantee(_Bounded):
    """A guarantee of the mechanism that was simulated: its noise came from a seed."""

    title = "Guarantee of the simulated mechanism"
    noise = "seeded"

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"The mechanism that this run simulates has the guarantee that, {_CORE}. {self.largest}"
        )


SENTENCES: tuple[type[Sentence], ...] = (
    NoPrivacy,
    InfiniteEpsilon,
    Withheld,
    NothingReleased,
    SimulatedGuarantee,
    Guarantee,
)
