"""What an engine's ledger comes to."""

from fedsim.accountant import Event, PrivacyLedger, RdpAccountant
from fedsim.accountant.budget.filter import PrivacyFilter
from fedsim.clients.privacy_engine.terms import PrivacyTerms


def ledger_epsilon(ledger: PrivacyLedger, terms: PrivacyTerms, delta: float | None) -> float:
    """Return ε at δ (by default the terms' own) by the terms' accountant."""
    return ledger.epsilon(_delta(terms, delta), terms.accountant, terms.adjacency)


def best_order(ledger: PrivacyLedger, terms: PrivacyTerms, delta: float | None) -> float | None:
    """Return the Rényi order that is best at δ; None where no order is involved."""
    renyi = ledger.compose_into(RdpAccountant(adjacency=terms.adjacency))
    return renyi.get_privacy_spent(_delta(terms, delta)).best_order


def affordable_events(
    ledger: PrivacyLedger,
    terms: PrivacyTerms,
    event: Event,
    target_epsilon: float,
    delta: float | None,
) -> int | None:
    """Return how many more of `event` fit in ε at δ; None if the ledger exceeds it already."""
    budget = PrivacyFilter(
        target_epsilon,
        _delta(terms, delta),
        accountant=terms.accountant,
        adjacency=terms.adjacency,
    )
    for entry, count in ledger.entries:
        budget.record(entry, count)
    return None if budget.spent > target_epsilon else budget.max_count(event)


def _delta(terms: PrivacyTerms, delta: float | None) -> float:
    return terms.target_delta if delta is None else delta
