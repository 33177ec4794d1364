"""Secure aggregation: what it hid, under which trust assumption, and what it does not change."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency
from fedsim.accountant.aggregate_view import (
    RoundView,
    UploadTerms,
    aggregate_view,
    failed_conditions,
)
from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence, count_text, range_text

_NOT_DP = (
    "Secure aggregation is not differential privacy: the ε of each client comes from its own noise "
    "and is not lowered by it."
)
_RELATIVE_TOLERANCE = 1e-6  # the same accountant on another machine
_HIDING_PROTOCOLS = ("additive", "secagg", "secagg_plus")


def hides_updates(facts: Facts) -> bool:
    """Whether a protocol ran that hides single updates from the server."""
    return (facts.secure_aggregation or {}).get("protocol") in _HIDING_PROTOCOLS


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
        return " ".join(
            [
                f"Updates were summed by the protocol {self.values.get('protocol')}: the server "
                f"saw {_sums(self.values)}, the participants and their timing, but no single "
                "update.",
                *_trust(self.values),
                *_rounds(self.values),
                *_exactness(self.values),
                _NOT_DP,
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


class AggregateViewSentence(Sentence):
    """The second, smaller ε: against an adversary who sees only the sums."""

    point, kind, title = "result", "claim", "Against an adversary who sees only the sums"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether theorem B holds for this run and reproduces the recorded ε."""
        view, mechanism = _view(facts), facts.mechanism
        if not (facts.is_bounded and hides_updates(facts)) or mechanism is None:
            return False
        epsilon, terms = view.get("epsilon"), _terms(view)
        if not isinstance(epsilon, float) or terms is None or failed_conditions(terms):
            return False
        if (facts.secure_aggregation or {}).get("clipped") != 0:
            return False
        ran = (mechanism.sampling, mechanism.noise, mechanism.clipping)
        if (terms.sampling, terms.noise, terms.clipping) != ran or epsilon > facts.epsilon:
            return False
        if not _is_of_its_client(view, facts):
            return False
        found = _recomputed(view, terms, mechanism.accountant, mechanism.adjacency)
        return found is not None and found <= epsilon * (1 + _RELATIVE_TOLERANCE)

    @property
    def text(self) -> str:
        """The sentence in words."""
        view = self.values
        return (
            f"Against an adversary who {view['adversary']}, the largest ε is "
            f"{epsilon_text(view['epsilon'])} at δ = {delta_text(view['delta'])} (theorem B: one "
            "noisy step per round, with noise that adds up over the clients of the sum; idealised "
            "to real numbers). It does not replace the guarantee, which holds against a server "
            "that sees every update."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """What is recorded of it."""
        return _view(self.facts)


class NoAggregateViewSentence(Sentence):
    """Why there is no smaller ε against an adversary who sees only the sums."""

    point, kind, title = "limit", "limit", "No smaller ε against an adversary who sees only sums"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether the run records that theorem B does not hold."""
        return facts.is_private and _view(facts).get("epsilon") == "not_claimed"

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Against an adversary who sees only sums of updates, no smaller ε is claimed: "
            f"{_view(self.facts).get('reason')}."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """What is recorded of it."""
        return _view(self.facts)


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


def _view(facts: Facts) -> dict[str, Any]:
    view = (facts.secure_aggregation or {}).get("aggregate_view")
    return dict(view) if isinstance(view, dict) else {}


def _terms(view: Mapping[str, Any]) -> UploadTerms | None:
    try:
        return UploadTerms(**view["terms"])
    except (KeyError, TypeError):
        return None


def _is_of_its_client(view: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the recorded ε covers every charged round of its client, as charged."""
    for client in facts.clients:
        if client.client == view.get("client"):
            own = (client.sampling_rate, client.delta)
            rounds = view.get("noise_multipliers")
            pairs = rounds if isinstance(rounds, list) else []
            return (view.get("sampling_rate"), view.get("delta")) == own and (
                sum(count for _, count in pairs) == client.rounds
            )
    return False


def _recomputed(
    view: Mapping[str, Any], terms: UploadTerms, accountant: str, adjacency: str
) -> float | None:
    try:
        pairs = tuple((float(z), int(count)) for z, count in view["noise_multipliers"])
        rate, delta = float(view["sampling_rate"]), float(view["delta"])
        return _epsilon(terms, pairs, rate, delta, accountant, adjacency)
    except (KeyError, TypeError, ValueError):
        return None


@lru_cache(maxsize=16)
def _epsilon(
    terms: UploadTerms,
    pairs: tuple[tuple[float, int], ...],
    sampling_rate: float,
    delta: float,
    accountant: AccountantName,
    adjacency: Adjacency,
) -> float | None:
    views = [
        view for z, count in pairs for view in [RoundView(sensitivity=1.0, noise=(z,))] * count
    ]
    return aggregate_view(
        terms,
        views,
        sampling_rate=sampling_rate,
        delta=delta,
        accountant=accountant,
        adjacency=adjacency,
    ).epsilon


FACTS: tuple[type[Sentence], ...] = (SecureAggregationSentence, NothingHiddenSentence)
RESULT: tuple[type[Sentence], ...] = (AggregateViewSentence,)
LIMITS: tuple[type[Sentence], ...] = (
    PartiesOnOneHostSentence,
    UnseenUpdatesSentence,
    NoAggregateViewSentence,
)
