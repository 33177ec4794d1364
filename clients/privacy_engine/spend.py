"""ε and remaining budget of an engine's ledger."""

from fedsim.accountant import (
    Accountant,
    Event,
    PrivacyLedger,
    PrivacySpent,
    RdpAccountant,
    make_accountant,
)
from fedsim.accountant.privacy_filter import PrivacyFilter
from fedsim.accountant.sampler_slack import SHARE, epsilon_with_slack, target_without_slack
from fedsim.accountant.search import largest_count
from fedsim.clients.privacy_engine.terms import PrivacyTerms


def ledger_spent(ledger: PrivacyLedger, terms: PrivacyTerms, delta: float | None) -> PrivacySpent:
    """Return ε of a ledger by the terms' accountant, with the slack of the sampler.

    Args:
        ledger: all charges.
        terms: accountant, adjacency and target δ.
        delta: δ; None: the target δ.

    Returns:
        ε at δ, and the accountant's Rényi order behind it.
    """
    account, delta = _account(ledger, terms), _delta(terms, delta)
    epsilon = epsilon_with_slack(account.get_epsilon, delta)
    return PrivacySpent(epsilon, delta, account.get_privacy_spent(delta * (1.0 - SHARE)).best_order)


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
    limit, inner_delta = target_without_slack(target_epsilon, _delta(terms, delta))
    if terms.alphas is not None:
        if _account(ledger, terms).get_epsilon(inner_delta) > limit:
            return None
        return largest_count(
            lambda n: _account(ledger, terms).compose(event, n).get_epsilon(inner_delta), limit
        )
    budget = PrivacyFilter(
        limit, inner_delta, accountant=terms.accountant, adjacency=terms.adjacency
    )
    for entry, count in ledger.entries:
        budget.record(entry, count)
    return None if budget.spent > budget.target_epsilon else budget.max_count(event)


def _account(ledger: PrivacyLedger, terms: PrivacyTerms) -> Accountant:
    """Return the terms' accountant with all charges of a ledger."""
    if terms.alphas is None:
        account = make_accountant(terms.accountant, adjacency=terms.adjacency)
    else:
        account = RdpAccountant(terms.alphas, adjacency=terms.adjacency)
    return ledger.compose_into(account)


def _delta(terms: PrivacyTerms, delta: float | None) -> float:
    return terms.target_delta if delta is None else delta
