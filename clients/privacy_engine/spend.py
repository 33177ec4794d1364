"""ε and remaining budget of an engine's ledger."""

from fedsim.accountant import Event, PrivacyLedger, RdpAccountant
from fedsim.accountant.budget.filter import PrivacyFilter
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.clients.privacy_engine.terms import PrivacyTerms


def ledger_epsilon(ledger: PrivacyLedger, terms: PrivacyTerms, delta: float | None) -> float:
    """Return the terms' accountant's ε of a ledger, with the slack of the sampler.

    Args:
        ledger: all charges.
        terms: accountant, adjacency and target δ.
        delta: δ; None: the target δ.
    """
    return ledger.epsilon_with_slack(_delta(terms, delta), terms.accountant, terms.adjacency)


def best_order(ledger: PrivacyLedger, terms: PrivacyTerms, delta: float | None) -> float | None:
    """Return the best Rényi order of the ledger's RDP bound; None where ε is 0 or infinite.

    Args:
        ledger: all charges.
        terms: adjacency and target δ.
        delta: δ; None: the target δ.
    """
    renyi = ledger.compose_into(RdpAccountant(adjacency=terms.adjacency))
    return renyi.get_privacy_spent(_delta(terms, delta)).best_order


def affordable_events(
    ledger: PrivacyLedger,
    terms: PrivacyTerms,
    event: Event,
    target_epsilon: float,
    delta: float | None,
) -> int | None:
    """Return the number of further events within a budget; None if the ledger exceeds it.

    Args:
        ledger: all charges so far.
        terms: accountant, adjacency and target δ.
        event: the event to repeat.
        target_epsilon: the budget.
        delta: δ of the budget; None: the target δ.
    """
    budget = PrivacyFilter(
        *target_without_slack(target_epsilon, _delta(terms, delta)),
        accountant=terms.accountant,
        adjacency=terms.adjacency,
    )
    for entry, count in ledger.entries:
        budget.record(entry, count)
    return None if budget.spent > budget.target_epsilon else budget.max_count(event)


def _delta(terms: PrivacyTerms, delta: float | None) -> float:
    return terms.target_delta if delta is None else delta
