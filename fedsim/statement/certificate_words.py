"""Certificates in a few words, for cards, tables and the terminal: each with its observer."""

import math

from fedsim.core.formatting import clients_text, delta_text, epsilon_text
from fedsim.statement import Facts
from fedsim.statement.certificates import OBSERVER_NAMES, certificates_of
from fedsim.statement.privacy_file import Certificate

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
