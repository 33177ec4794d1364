"""The adversary, the neighbouring data sets, and what the guarantee means for an attacker."""

from collections.abc import Mapping
from typing import Any

from fedsim.core.formatting import clients_text, count_text, delta_text, epsilon_text, percent_text
from fedsim.statement.facts import COUNTING_CLIPPINGS, Facts
from fedsim.statement.secure import hides_updates, privacy_requires
from fedsim.statement.sentence import Sentence
from fedsim.statement.views import question_of, view_of


class ThreatModelSentence(Sentence):
    """Against whom the guarantee holds."""

    point, kind, title = "threat model", "claim", "Against whom"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        votes, trust = self.facts.counts_votes, self.facts.trust
        uploads = "votes" if votes else "updates"
        models = "every global model, the final one included"
        if votes:
            models = "every noisy share of the votes, every answer and the student"
        itself = (
            f"A client is trusted with its own examples: the guarantee covers its {uploads} and "
            "gives no protection from the client itself."
        )
        if trust.trust == "distributed":
            return (
                f"The adversary sees every sum that is opened and {models}. It knows every setting "
                "and all participants. Trusted are the parties of "
                f"secure aggregation ({privacy_requires(self.facts)}), and all but "
                f"{count_text(trust.colluding_clients or 0, 'client')} of each sum. {itself}"
            )
        if trust.trust == "central":
            drawn = trust.participation_rate is not None
            known = "but not the participants of a round" if drawn else "and all participants"
            return (
                f"The adversary sees {models}. It knows every "
                f"setting {known}, and may collude with all other clients. The server is trusted: "
                f"it adds the noise. {itself}"
            )
        return (
            "The adversary is the server, or any other party that sees every "
            f"{'noisy vote' if votes else 'update'} of a client. It knows every setting and all "
            f"participants, may {'ask any query' if votes else 'send any model'}, and may collude "
            f"with all other clients. {itself}"
        )


class ReleasedSentence(Sentence):
    """What leaves a client."""

    point, kind, title = "threat model", "fact", "What is released"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there are private clients."""
        return facts.is_private

    @property
    def text(self) -> str:
        """The sentence in words."""
        if self.facts.counts_votes:
            return self._votes_text
        mechanism = self.facts.mechanism
        adaptive = mechanism is not None and mechanism.clipping in COUNTING_CLIPPINGS
        bound = ", its adapted clipping bound" if adaptive else ""
        local = self.facts.trust.trust == "local"
        drawn = self.facts.trust.participation_rate is not None
        rounds = "takes part in" if drawn else "is charged for"
        mask, source = "", "these models" if local else "these integers"
        if hides_updates(self.facts):
            mask, source = " (masked, so that only sums can be opened)", "these sums"
        return (
            f"A client sends {self._upload} after every round that it {rounds}{mask}{bound}, "
            f"its settings and its ledger. The server computes the global models from {source} "
            "alone. Per-example gradients, training losses and lot sizes stay on the client. "
            "If a client fails, its error message leaves it too."
        )

    @property
    def _votes_text(self) -> str:
        trust = self.facts.trust.trust
        noise = "without noise" if trust == "central" else "with its noise"
        if trust == "distributed":
            noise = "with its share of the noise"
        mask = " (masked, so that only sums can be opened)" if hides_updates(self.facts) else ""
        return (
            f"A client sends the votes of its teacher on public queries, {noise}{mask}, its "
            "settings and its ledger. Teachers, their training losses and all that they predict "
            "beside these votes stay on the clients. The student is trained on public queries and "
            "the answers alone. If a client fails, its error message leaves it too."
        )

    @property
    def _upload(self) -> str:
        facts = self.facts
        if facts.trust.trust == "local":
            return "its model"
        clipped = "whole update" if facts.protects_clients else "clipped gradients"
        shared = facts.trust.trust == "distributed"
        noise = "with its share of the noise" if shared else "without noise"
        return f"the integers of its {clipped}, on a public grid and {noise},"


class UnitSentence(Sentence):
    """What one ε protects."""

    point, kind, title = "unit", "limit", "One training example, not one person"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee for examples."""
        return facts.is_bounded and not facts.protects_clients

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The unit is one training example of one client. A person with several examples on "
            "one client is protected less. For a person with examples on several clients, the "
            "spends of these clients compose. Neither case is computed here."
        )


class ClientUnitSentence(Sentence):
    """What one ε protects where the unit is the client."""

    point, kind, title = "unit", "limit", "Everything that one client has"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee for clients."""
        return facts.is_bounded and facts.protects_clients

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The unit is everything that one client has: all of its examples together, and their "
            "number. For a person with data on several clients, the spends of these clients "
            "compose, which is not computed here. An ε of this unit and an ε of one example are "
            "not comparable."
        )


_CLIENT_ADJACENCIES = {
    "zero_out": "zero-out adjacency: the updates of one client are replaced by zero",
    "replace_one": "replace-one adjacency: everything that one client has is replaced",
}
_ADJACENCIES = {
    "zero_out": "zero-out adjacency: the contribution of one example is replaced by zero, and "
    "client sizes are public",
    "add_remove": "add/remove adjacency: one example is added or removed; client sizes are "
    "private, and a declared size takes their place",
    "replace_one": "replace-one adjacency: one example is replaced by another, and client sizes "
    "are public",
}
_VOTE_ADJACENCY = (
    "zero-out adjacency, where one client votes for nothing, and by replacement, where everything "
    "that one client has is replaced; the charge covers both"
)


class AdjacencySentence(Sentence):
    """The adjacency of the guarantee, its sensitivity, and what is public."""

    point, kind, title = "adjacency", "claim", "Neighbouring data sets"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee for a known adjacency."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        meaning, sensitivity = self._meaning
        if self.facts.counts_votes:
            return (
                f"Data sets are neighbours by {meaning}, and who takes part is public. The L2 "
                "sensitivity of the votes on a query is at most √2: another teacher moves two "
                "counts by 1, and a client that is zeroed out moves one count. All settings, the "
                "planned number of clients, the queries and the server's test set are public as "
                "well."
            )
        if self.facts.protects_clients:
            secret = self.facts.trust.participation_rate is not None
            taking_part = "secret" if secret else "public"
            return (
                f"Data sets are neighbours by {meaning}, and who takes part is {taking_part}. The "
                f"L2 sensitivity of a sum of clipped updates is then at most {sensitivity}. All "
                "settings, the planned number of clients and the server's test set are public as "
                "well."
            )
        return (
            f"Data sets are neighbours by {meaning}. The L2 sensitivity of "
            f"{self.facts.kind.sensitivity_of} is then at most {sensitivity}. All settings, the "
            "participation schedule, sampling rates, step counts and the server's test set are "
            "public as well."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The adjacency and its sensitivity."""
        return {"adjacency": self._name, "sensitivity": self._meaning[1]}

    @property
    def _meaning(self) -> tuple[str, str]:
        kind = self.facts.kind
        if self.facts.counts_votes:
            return _VOTE_ADJACENCY, kind.sensitivity
        of_unit = _CLIENT_ADJACENCIES if kind.protects_client else _ADJACENCIES
        twice = "2" if kind.sensitivity == "1" else f"2{kind.sensitivity}"
        return of_unit[self._name], twice if self._name == "replace_one" else kind.sensitivity

    @property
    def _name(self) -> str:
        return self.facts.mechanism.adjacency if self.facts.mechanism else ""


class SpreadSentence(Sentence):
    """The maximum ε, which is the guarantee, beside median and minimum, which are not."""

    point, kind, title = "result", "fact", "Every client, and the federation"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        facts = self.facts
        clients = count_text(len(facts.clients), "client")
        smallest = min(client.epsilon for client in facts.clients)
        return (
            f"The guarantee for all clients is the maximum over {clients}: "
            f"ε = {epsilon_text(facts.epsilon)} of client {facts.worst.client}. The median "
            f"({epsilon_text(facts.median)}) and the minimum ({epsilon_text(smallest)}) are "
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


class DeltaBelowOneInNSentence(Sentence):
    """δ is so small that the definition does not allow publishing an example."""

    point, kind, title = "delta", "fact", "Why this δ"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee, and every δ is below 1 / examples."""
        return facts.is_bounded and not facts.clients_with_large_delta

    @property
    def text(self) -> str:
        """The sentence in words."""
        share = percent_text(self._largest)
        if self.facts.protects_clients:
            return (
                f"δ is below 1 / the number of clients: δ · clients is at most {share}. With this "
                "probability, δ alone would allow to publish everything of one client. Keep it far "
                "below 100%."
            )
        if self.facts.sizes_are_declared:
            return (
                "Every client's δ is below 1 / its declared examples: δ · declared examples is at "
                f"most {share}. The real number is private, and this says nothing about a client "
                "that holds more than declared: let privacy.adjacency.declared_examples be no less "
                "than any client's examples. δ · examples is the probability with which δ alone "
                "would allow a client to publish one of them. Keep it far below 100%."
            )
        return (
            f"Every client's δ is below 1 / its examples: δ · examples is at most {share}. With "
            "this probability, δ alone would allow a client to publish one of its examples. Keep "
            "it far below 100%."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The largest δ times examples."""
        return {"largest_delta_times_examples": self._largest}

    @property
    def _largest(self) -> float:
        clients = self.facts.clients
        if self.facts.protects_clients:
            return max(client.delta for client in clients) * len(clients)
        return max(client.delta * client.examples for client in clients)


class DeltaTooLargeSentence(Sentence):
    """Some δ is so large that the definition allows publishing an example."""

    point, kind, title = "delta", "warning", "δ is too large"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee, and some δ is too large."""
        return facts.is_bounded and bool(facts.clients_with_large_delta)

    @property
    def text(self) -> str:
        """The sentence in words."""
        clients = clients_text(self.facts.clients_with_large_delta)
        if self.facts.protects_clients:
            return (
                "δ is not below 1 / the number of clients. With a δ this large, a federation that "
                "publishes everything of one client, chosen at random, would satisfy the "
                "definition. Choose a smaller privacy.delta."
            )
        return (
            f"δ is not below 1 / examples for {clients}. With a δ this large, a client that "
            "publishes one of its examples, chosen at random, would satisfy the definition. "
            "Choose a smaller privacy.delta."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The clients."""
        return {"clients": list(self.facts.clients_with_large_delta)}


class AttackBoundSentence(Sentence):
    """Bounds on the true-positive rate of membership inference, on any client."""

    point, kind, title = "attack", "claim", "What an attacker can gain"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee, and a bound that is nowhere below the worst client's."""
        profile, attack = facts.profile, facts.attack
        return facts.is_bounded and bool(profile and attack and attack.covers(profile))

    @property
    def text(self) -> str:
        """The sentence in words."""
        first, *rest = (
            (f"{100 * rate:.4g}%", f"at most {percent_text(bound)}") for rate, bound in self._table
        )
        others = "; ".join(f"at {rate}, {top}" for rate, top in rest)
        return (
            f"An attacker sees {view_of(self.facts).sees}, and guesses {question_of(self.facts)}. "
            f"At a false-positive rate of {first[0]}, the true-positive rate is {first[1]}; "
            f"{others}. {self._reach}"
        )

    @property
    def _reach(self) -> str:
        if len(self.facts.clients) == 1:
            return "This follows from the client's whole curve δ(ε)."
        text = "Each is the largest bound of any client, from the client's whole curve δ(ε)."
        tied = self.facts.worst_clients
        if len(tied) == 1:
            return text
        return f"{text} ε ties for {clients_text(tied)}, and their curves may cross."

    @property
    def values(self) -> Mapping[str, Any]:
        """The bound at each false-positive rate, and the clients with the largest ε."""
        return {
            "true_positive_bounds": [
                {"false_positive_rate": rate, "bound": bound} for rate, bound in self._table
            ],
            "clients_with_largest_epsilon": list(self.facts.worst_clients),
        }

    @property
    def _table(self) -> tuple[tuple[float, float], ...]:
        return self.facts.attack.table if self.facts.attack else ()


class GaussianBoundSentence(Sentence):
    """The whole trade-off curve bounded by one number, μ."""

    point, kind, title = "attack", "claim", "As one Gaussian"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee whose curve lies below that of a Gaussian."""
        return facts.is_bounded and facts.profile is not None and facts.profile.mu is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        mu = epsilon_text(self.facts.profile.mu if self.facts.profile else None)
        slack = self.values["slack"]
        return (
            f"With μ = {mu}, no attack on client {self.facts.worst.client} has a true-positive "
            f"rate more than {delta_text(slack)} above that of the best test between two normal "
            "distributions that lie μ standard deviations apart. This is proved from δ(ε), without "
            f"a fit or a central limit theorem.{self._others}"
        )

    @property
    def _others(self) -> str:
        one = len(self.facts.clients) == 1
        return "" if one else " The μ of another client may be larger."

    @property
    def values(self) -> Mapping[str, Any]:
        """μ, and what is added to the true-positive rate."""
        profile = self.facts.profile
        return {"mu": profile.mu, "slack": profile.slack} if profile else {}


SETTING: tuple[type[Sentence], ...] = (
    ThreatModelSentence,
    ReleasedSentence,
    UnitSentence,
    ClientUnitSentence,
    AdjacencySentence,
)
RESULT: tuple[type[Sentence], ...] = (
    DeltaBelowOneInNSentence,
    DeltaTooLargeSentence,
    SpreadSentence,
    AttackBoundSentence,
    GaussianBoundSentence,
)
