"""Secure aggregation: what it hid, under which trust assumption, and what it does not change."""

from collections.abc import Mapping
from typing import Any

from fedsim.core.formatting import count_text, delta_text, range_text
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence
from fedsim.statement.trust_facts import HIDING_PROTOCOLS

_NOT_DP = (
    "Secure aggregation is not differential privacy: the ε of each client comes from its own noise "
    "and is not lowered by it."
)
_ROLES = {
    "local": _NOT_DP,
    "distributed": "Secure aggregation is not differential privacy: it hides each client's part, "
    "so that the noise of the other clients of a sum protects it as well. The guarantee against an "
    "observer of sums needs it; the one against the server does not.",
    "central": "Secure aggregation is not differential privacy: the noise comes from the server, "
    "and no ε is lowered by the protocol.",
}


def hides_updates(facts: Facts) -> bool:
    """Whether a protocol ran that hides single updates from the server."""
    return (facts.secure_aggregation or {}).get("protocol") in HIDING_PROTOCOLS


def privacy_requires(facts: Facts) -> str:
    """Return the recorded trust assumption of the protocol."""
    trust = (facts.secure_aggregation or {}).get("trust")
    recorded = trust.get("privacy_requires") if isinstance(trust, Mapping) else None
    return "its trust assumption is not recorded" if recorded is None else str(recorded)


class SecureAggregationSentence(Sentence):
    """The server's view, and the trust assumption behind it."""

    point, kind, title = "threat model", "fact", "Secure aggregation"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a protocol ran that hides single updates."""
        return hides_updates(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        trust = self.facts.trust.trust
        return " ".join(
            [
                f"Updates were summed by the protocol {self.values.get('protocol')}: the server "
                f"saw {_sums(self.values)}, the participants and their timing, but no single "
                "update.",
                *_trust(self.values),
                *_rounds(self.values),
                *(_exactness(self.values) if trust == "local" else ()),
                _ROLES.get(trust, _NOT_DP),
            ]
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """What is recorded of it."""
        return dict(self.facts.secure_aggregation or {})


class NothingHiddenSentence(Sentence):
    """The control arm: the arithmetic of secure aggregation without its cryptography."""

    point, kind, title = "threat model", "fact", "Secure aggregation without cryptography"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether secure aggregation ran without hiding anything."""
        return facts.secure_aggregation is not None and not hides_updates(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"Updates were quantised and summed in plaintext (protocol "
            f"{self.values.get('protocol')}, a control arm): the server saw each of them. "
            + _NOT_DP
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """What is recorded of it."""
        return dict(self.facts.secure_aggregation or {})


class PartiesOnOneHostSentence(Sentence):
    """A simulation has one operator, who could combine all shares."""

    point, kind, title = "limit", "limit", "Non-collusion is simulated"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether one operator ran all parties."""
        recorded = facts.secure_aggregation or {}
        return hides_updates(facts) and bool(recorded.get("simulated_non_collusion"))

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "All parties of secure aggregation ran in one simulation. Every message of the "
            "protocol was real; the non-collusion of its parties was simulated."
        )


class UnseenUpdatesSentence(Sentence):
    """Updates that the server cannot see cannot be checked by it."""

    point, kind, title = "limit", "limit", "Updates are not checked"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a protocol ran that hides single updates."""
        return hides_updates(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Secure aggregation gives no protection against clients that send false updates: the "
            "server cannot inspect a single update."
        )


def _sums(recorded: Mapping[str, Any]) -> str:
    sums = [f"the {one}" for one in recorded.get("server_view", ()) if one.startswith("sum of ")]
    return ", ".join(sums) or "sums only"


def _trust(recorded: Mapping[str, Any]) -> list[str]:
    trust = recorded.get("trust")
    if not isinstance(trust, dict):
        return []
    texts = [f"This requires: {trust['privacy_requires']}."]
    if trust.get("forged_clients") == "undetected":
        texts.append(
            "The minimum number of clients in a sum is a count: a server that makes clients up can "
            "open a sum with a single real client."
        )
    return texts


def _rounds(recorded: Mapping[str, Any]) -> list[str]:
    parties, rounds = recorded.get("parties"), recorded.get("rounds")
    if not isinstance(parties, dict) or not isinstance(rounds, dict):
        return []
    survivors = parties["survivors_per_round"]
    texts = []
    if survivors:
        sums = count_text(len(survivors), "sum")
        texts = [f"{sums} of {range_text(survivors)} clients were opened."]
    if rounds["aborted"]:
        aborted = count_text(rounds["aborted"], "round")
        texts.append(f"{aborted} could not be opened and remain charged.")
    return texts


def _exactness(recorded: Mapping[str, Any]) -> list[str]:
    encoding = recorded.get("encoding")
    if not isinstance(encoding, dict):
        return []
    return [
        "Every mean equals the mean of the quantised updates bit for bit. It differs from the mean "
        "in real numbers by at most "
        f"{delta_text(encoding['max_abs_error'])} in each coordinate."
    ]


FACTS: tuple[type[Sentence], ...] = (SecureAggregationSentence, NothingHiddenSentence)
LIMITS: tuple[type[Sentence], ...] = (PartiesOnOneHostSentence, UnseenUpdatesSentence)
