"""The certificates of a run, one for each observer, where each of them ends, and in a few words.

Several certificates of one run hold at once. Each is for its own observer: no sentence adds,
averages or compares them.
"""

import math
from collections.abc import Mapping
from typing import Any

from fedsim.accountant.trust import Observer
from fedsim.core.formatting import clients_text, count_text, delta_text, epsilon_text
from fedsim.statement.facts import Facts
from fedsim.statement.privacy_file import Certificate
from fedsim.statement.sentence import Sentence
from fedsim.statement.trust_facts import UNMET_CONDITIONS, unmet_conditions
from fedsim.statement.views import core_text

OBSERVER_NAMES: Mapping[Observer, str] = {
    "server": "a server that sees every update",
    "sums": "an observer of sums",
    "models": "an observer of global models",
}


def certificates_of(facts: Facts) -> list[Certificate]:
    """Return one certificate for each observer; ε is None where the facts do not support it."""
    if not facts.is_private:
        return []
    views = (facts, facts.against_server)
    return [
        Certificate(against=name, epsilon=supported_epsilon(found), delta=facts.delta)
        for name, found in zip(facts.trust.observers, views, strict=False)
    ]


def supported_epsilon(facts: Facts | None) -> float | None:
    """Return the largest ε that the facts support; None without one."""
    if facts is None or not facts.is_private or facts.objections:
        return None
    return facts.epsilon if math.isfinite(facts.epsilon) and facts.clients else None


def _is_shared(facts: Facts) -> bool:
    return facts.is_private and facts.trust.trust == "distributed"


class AgainstServerSentence(Sentence):
    """The second guarantee of distributed trust: a client's own share of the noise."""

    point, kind, title = "guarantee", "claim", "Guarantee against the server"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether the shares of distributed trust have a finite ε of their own."""
        other = facts.against_server
        return _is_shared(facts) and other is not None and other.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        other = self.facts.against_server or self.facts
        seeded = other.mechanism is not None and other.mechanism.noise == "seeded"
        simulated = "In the mechanism that this run simulates, e" if seeded else "E"
        return (
            f"{simulated}ach client's own share of the noise protects it alone, whatever the other "
            "parties do, also if they all collude, make clients up or open single updates: "
            f"{core_text(other)}. The largest ε_k is {epsilon_text(other.epsilon)} at δ = "
            f"{delta_text(other.delta)}. Both guarantees hold at once, each against its own "
            "observer; never add or compare their ε."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The pair that holds for every client against the server."""
        other = self.facts.against_server or self.facts
        return {"epsilon": other.epsilon, "delta": other.delta, "client": other.worst.client}


class NoServerGuaranteeSentence(Sentence):
    """Shares of distributed trust that support no certificate against the server."""

    point, kind, title = "guarantee", "warning", "No guarantee against the server"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether clients were charged for shares, and these support no ε against the server."""
        charged = _is_shared(facts) and facts.has_charges
        return charged and supported_epsilon(facts.against_server) is None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "No ε is stated against a server that sees single updates: the recorded shares of the "
            "noise support none. `fedsim verify` checks the run against its ledger."
        )


class TrustedServerSentence(Sentence):
    """The server of central trust, against which there is no certificate."""

    point, kind, title = "limit", "limit", "No guarantee against the server"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether clients were charged in central trust."""
        return facts.is_private and facts.has_charges and facts.trust.trust == "central"

    @property
    def text(self) -> str:
        """The sentence in words."""
        what = "votes" if self.facts.counts_votes else "updates"
        seen = f"{'single' if self.facts.secure_aggregation is None else 'sums of'} {what}"
        return (
            f"The server is trusted: it sees {seen} without noise. No ε of this run covers what "
            "the server learns, or a party that can read its memory."
        )


class CollusionSentence(Sentence):
    """What fails when more clients collude than planned."""

    point, kind, title = "limit", "limit", "Colluding clients"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee against an observer of sums."""
        return facts.is_bounded and _is_shared(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        trust = self.facts.trust
        colluders, honest = trust.colluding_clients or 0, trust.honest_clients
        if colluders:
            allowed = (
                f"Up to {count_text(colluders, 'client')} of a sum may collude with its observer, "
                "or add no noise; every client knows its own noise, so a curious client is one"
            )
        else:
            allowed = (
                "No client of a sum may collude with its observer, or add no noise; a curious "
                "client, which knows its own noise, is not covered"
            )
        return (
            f"{allowed}. The guarantee counts the noise of {count_text(honest, 'honest client')} "
            f"of a sum, and no sum of fewer than {trust.min_clients} clients is opened. Where more "
            "clients collude, the guarantee against the server holds alone."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The numbers of clients behind the noise of a sum."""
        trust = self.facts.trust
        return {
            "min_clients": trust.min_clients,
            "colluding_clients": trust.colluding_clients,
            "honest_clients": trust.honest_clients,
        }


class ActiveServerSentence(Sentence):
    """Whether the guarantee against an observer of sums covers a server that cheats."""

    point, kind, title = "limit", "limit", "A server that departs from the protocol"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee against an observer of sums."""
        return facts.is_bounded and _is_shared(facts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        unmet = self.values["unmet"]
        if not unmet:
            return (
                "The guarantee against an observer of sums covers a server that departs from the "
                "protocol: keys are pinned, every upload is bound to one run, round, model, client "
                "set and plan of the noise, and enters one sum. Every client must hold the plan "
                "that its operator reviewed, which no file of the server proves."
            )
        return (
            "The guarantee against an observer of sums is for a server that follows the protocol. "
            "Against one that departs from it, the guarantee against the server holds alone: "
            f"{'; '.join(UNMET_CONDITIONS[name] for name in unmet)}."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The conditions that are not met."""
        return {"unmet": unmet_conditions(self.facts.secure_aggregation)}


class SizesExcludedSentence(Sentence):
    """Weights by size make the size of a client a public fact."""

    point, kind, title = "limit", "limit", "Sizes of clients are not covered"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether everything of a client is protected, and its weight follows from its size."""
        weighting = facts.trust.weighting
        return facts.is_bounded and facts.protects_clients and weighting not in (None, "uniform")

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"Clients are weighted by {self.facts.trust.weighting}, which follows from the number "
            "of a client's examples. These numbers are treated as public facts that were fixed "
            "before the run: no ε covers them."
        )


CLAIMS: tuple[type[Sentence], ...] = (AgainstServerSentence, NoServerGuaranteeSentence)
LIMITS: tuple[type[Sentence], ...] = (
    TrustedServerSentence,
    CollusionSentence,
    ActiveServerSentence,
    SizesExcludedSentence,
)


SHORT_NAMES = {"server": "server", "sums": "sums", "models": "models"}
"""Names of the observers in headings: `ε (sums)`."""


def is_plain(facts: Facts) -> bool:
    """Whether a run has local trust and the example unit, whose ε needs no further name."""
    return facts.trust.trust == "local" and not facts.protects_clients


def stated_certificates(facts: Facts) -> list[tuple[Certificate, float]]:
    """Return the certificates that the statement supports, with their ε."""
    if not facts.has_charges:
        return []
    found = certificates_of(facts)
    return [(one, one["epsilon"]) for one in found if one["epsilon"] is not None]


def unit_text(facts: Facts) -> str:
    """Return what one ε is for, in a few words."""
    return "everything of one client" if facts.protects_clients else "one example"


def guarantee_words(facts: Facts) -> str:
    """Return the guarantee of a run in a few words, or the reason why there is none."""
    if not facts.is_private:
        return "no differential privacy"
    stated = [
        f"within ε = {epsilon_text(epsilon)} at δ = {delta_text(one['delta'])} against "
        f"{OBSERVER_NAMES[one['against']]}"
        for one, epsilon in stated_certificates(facts)
    ]
    if facts.unbounded_clients or facts.objections:
        first = _no_guarantee(facts)
        return first if not stated else f"{first}; every client {stated[0]}"
    if not facts.has_charges:
        return "no update was released, and no privacy was spent"
    if is_plain(facts):
        epsilon, delta = epsilon_text(facts.epsilon), delta_text(facts.delta)
        return f"every client within ε = {epsilon} at δ = {delta}"
    return f"for {unit_text(facts)}, every client {', and '.join(stated)}"


def _no_guarantee(facts: Facts) -> str:
    if math.isinf(facts.epsilon):
        return f"no guarantee for the federation: ε = ∞ for {clients_text(facts.unbounded_clients)}"
    return f"no guarantee: {facts.objections[0]}"
