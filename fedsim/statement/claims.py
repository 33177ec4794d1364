"""Whom the guarantee holds against, between what neighbours, and what follows from it."""

from collections.abc import Mapping
from typing import Any

from fedsim.core.formatting import delta_text, epsilon_text, percent_up
from fedsim.statement.facts import COUNTING_CLIPPINGS, Facts
from fedsim.statement.profile import FALSE_POSITIVE_RATES
from fedsim.statement.secure import hides_updates
from fedsim.statement.sentence import Sentence, named


class ThreatModel(Sentence):
    """Against whom the guarantee holds."""

    point, kind, title = "threat model", "claim", "Against whom"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee."""
        return facts.bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The adversary is the server, or whoever else sees every update of a client. It knows "
            "every setting and who took part, may send any model, and may act together with all "
            "other clients. The client that holds an example is trusted with it: this is "
            "example-level privacy of a client's updates, not protection from the client."
        )


class Released(Sentence):
    """What leaves a client."""

    point, kind, title = "threat model", "fact", "What is released"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there are private clients."""
        return facts.private

    @property
    def text(self) -> str:
        """The sentence in words."""
        mechanism = self.facts.mechanism
        learns = mechanism is not None and mechanism.clipping in COUNTING_CLIPPINGS
        bound = ", the clipping bound that it has learnt" if learns else ""
        model, sums = "its model", "these"
        if hides_updates(self.facts):
            model, sums = "its model, masked for all but the sum,", "the sums of these"
        return (
            f"A client's messages hold {model} after every round that it is charged for{bound}, "
            "its settings and its ledger. The server's global models are made from "
            f"{sums} alone. "
            "Gradients of single examples, training losses and the sizes of the lots drawn stay in "
            "the client. Should it fail, the error message leaves it too."
        )


class Unit(Sentence):
    """What one ε protects."""

    point, kind, title = "unit", "limit", "One training example, not one person"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee."""
        return facts.bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The unit is one training example of one client. A person with several examples in a "
            "client is protected less, and one with examples in several clients bears the spend "
            "of all of them together; neither is computed here."
        )


_ADJACENCIES = {
    "zero_out": (
        "zero-out adjacency: one example's contribution is replaced by nothing, and client sizes "
        "are public",
        "C",
    ),
    "add_remove": (
        "add/remove adjacency: one example is added or removed, and client sizes are private; a "
        "declared size takes their place",
        "C",
    ),
    "replace_one": (
        "replace-one adjacency: one example becomes another, and client sizes are public",
        "2C",
    ),
}


class Adjacency(Sentence):
    """Between which data sets the guarantee holds."""

    point, kind, title = "adjacency", "claim", "Neighbouring data sets"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee for a known adjacency."""
        return facts.bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        meaning, sensitivity = _ADJACENCIES[self._name]
        return (
            f"Neighbours are those of {meaning}. A sum of clipped gradients then moves by at most "
            f"{sensitivity} in L2 norm. Public are also all settings, the schedule of "
            "participation, sampling rates, numbers of steps and the server's test set."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The adjacency and its sensitivity."""
        return {"adjacency": self._name, "sensitivity": _ADJACENCIES[self._name][1]}

    @property
    def _name(self) -> str:
        return self.facts.mechanism.adjacency if self.facts.mechanism else ""


class Spread(Sentence):
    """The maximum beside the statistics that are no guarantee."""

    point, kind, title = "result", "fact", "Every client, and the federation"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee."""
        return facts.bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        facts = self.facts
        smallest = min(client.epsilon for client in facts.clients)
        return (
            f"The maximum over {len(facts.clients):,} clients, ε = {epsilon_text(facts.epsilon)} "
            f"of client {facts.worst.client}, is what holds for everybody. The median "
            f"({facts.median:.4g}) and the smallest ε ({smallest:.4g}) are "
            "statistics, not guarantees."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Maximum, median and minimum."""
        return {
            "max": self.facts.epsilon,
            "median": self.facts.median,
            "min": min(client.epsilon for client in self.facts.clients),
        }


class DeltaBelowOneInN(Sentence):
    """δ is small enough that no client may publish an example outright."""

    point, kind, title = "delta", "fact", "Why this δ"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee, and every δ is below 1 / examples."""
        return facts.bounded and not facts.loose_deltas

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"Every client's δ is below 1 / its examples: δ · examples is at most "
            f"{percent_up(self._largest)}, the chance at which δ alone would let a client publish "
            "one of its examples. Keep it far below 100%."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The largest δ times examples."""
        return {"largest_delta_times_examples": self._largest}

    @property
    def _largest(self) -> float:
        return max(client.delta * client.examples for client in self.facts.clients)


class DeltaTooLarge(Sentence):
    """Some δ is so large that the definition allows publishing an example."""

    point, kind, title = "delta", "warning", "δ is not below 1 / examples"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee, and some δ is too large."""
        return facts.bounded and bool(facts.loose_deltas)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"δ is not below 1 / examples for {named(self.facts.loose_deltas)}. With a δ this "
            "large, a client that publishes one of its examples outright would satisfy the "
            "definition; choose a smaller privacy.delta."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients."""
        return {"clients": list(self.facts.loose_deltas)}


class AttackBound(Sentence):
    """What the guarantee leaves to an attacker."""

    point, kind, title = "attack", "claim", "What an attacker can gain"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee with a whole curve δ(ε) behind it."""
        return facts.bounded and facts.profile is not None and bool(facts.profile.curve)

    @property
    def text(self) -> str:
        """The sentence in words."""
        first, *rest = (
            (f"{100 * rate:.4g}%", f"at most {percent_up(bound)}") for rate, bound in self._attack
        )
        others = ", ".join(f"with {rate}, {top}" for rate, top in rest)
        return (
            f"Take an attacker who sees all updates of client {self.facts.worst.client}, whose ε "
            "is the largest, and guesses whether one given example was in its training data. If it "
            f"wrongly says yes to {first[0]} of the examples that were not, it rightly says yes to "
            f"{first[1]} of those that were; {others}. This follows from the client's whole "
            "curve δ(ε). The curves of other clients may cross it; for them "
            "e^ε · FPR + δ with the ε of the federation holds."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The bound at each false-positive rate."""
        return {
            "true_positive_bounds": [
                {"false_positive_rate": rate, "bound": bound} for rate, bound in self._attack
            ]
        }

    @property
    def _attack(self) -> tuple[tuple[float, float], ...]:
        profile = self.facts.profile
        bound = profile.true_positive_bound if profile else float
        return tuple((rate, bound(rate)) for rate in FALSE_POSITIVE_RATES)


class GaussianBound(Sentence):
    """The whole trade-off in one number."""

    point, kind, title = "attack", "claim", "As one Gaussian"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee whose curve lies below that of a Gaussian."""
        return facts.bounded and facts.profile is not None and facts.profile.mu is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        mu = epsilon_text(self.facts.profile.mu if self.facts.profile else None)
        slack = self.values["slack"]
        if slack == 0.0:
            return (
                f"Client {self.facts.worst.client} is μ-GDP with μ = {mu}: its releases are no "
                "easier to tell apart than two normal distributions that lie μ standard deviations "
                "apart."
            )
        return (
            f"With μ = {mu}, no attack on client {self.facts.worst.client} has a true-positive "
            "rate more than "
            f"{delta_text(slack)} above that against two normal distributions that lie μ standard "
            "deviations apart. This is proved from δ(ε), not fitted to it; no central limit is "
            "involved."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """μ, and what is added to the true-positive rate."""
        profile = self.facts.profile
        return {"mu": profile.mu, "slack": profile.slack} if profile else {}


SETTING: tuple[type[Sentence], ...] = (ThreatModel, Released, Unit, Adjacency)
RESULT: tuple[type[Sentence], ...] = (
    DeltaBelowOneInN,
    DeltaTooLarge,
    Spread,
    AttackBound,
    GaussianBound,
)
