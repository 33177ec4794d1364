"""Checks of a federation's plan: batch sizes against client sizes, steps against budgets.

Batch sizes are checked with privacy only. Without privacy, a client with fewer examples than
`batch_size` has all of them in each batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from fedsim.clients.mechanisms.plan import Accounting, PrivacyBudgetError, PrivacyPlan
from fedsim.core.formatting import clients_text, epsilon_text
from fedsim.data import DataError
from fedsim.experiment import Experiment
from fedsim.federation.federation import Federation
from fedsim.statement.facts import clients_with_large_delta

_MAX_RATE_RATIO = 3.0  # largest sampling rate over the median that needs no warning


def check_batch_size(experiment: Experiment, sizes: Sequence[int]) -> None:
    """Check that `batch_size` is not above the size of every client.

    Nothing is checked where `batch_size` does not set the clients' sampling rates.

    Args:
        experiment: the settings.
        sizes: the number of examples of each client.

    Raises:
        DataError: `batch_size` is above the declared size of every client.
    """
    batch, declared = experiment.local.batch_size, _declared_sizes(experiment, sizes)
    if batch != "full" and declared and batch > max(declared):
        largest = max(declared)
        raise DataError(
            f"local.batch_size: {batch:,} is above the size of every client, at most {largest:,}; "
            "set local.batch_size=full for batches of all examples, or a smaller number"
        )


def full_batch_note(experiment: Experiment, sizes: Sequence[int]) -> str | None:
    """Return a warning if the batch size is too large for the smallest clients, else None.

    With one batch size for all, the smallest client has the largest sampling rate, and so the most
    noise. The warning is given if the batch size exceeds a client's number of examples, or if the
    largest rate is far above the median.

    Args:
        experiment: the settings.
        sizes: the number of examples of each client.
    """
    batch = experiment.local.batch_size
    declared = [size for size in _declared_sizes(experiment, sizes) if size > 0]
    if batch == "full" or not declared:
        return None
    rates = [min(1.0, batch / size) for size in declared]
    usual, largest = median_high(rates), max(rates)
    small = [size for size in declared if size < batch]
    if not small and largest <= _MAX_RATE_RATIO * usual:
        return None
    fix = f"; privacy.sampling.rate={usual:.2g} gives every client the same rate"
    if small:
        return (
            f"local.batch_size = {batch:,} is above the size of {len(small):,} of {len(sizes):,} "
            f"clients (the smallest has {min(small):,} examples): their sampling rate is 1, which "
            f"gives no amplification{'' if usual == 1.0 else fix}"
        )
    return (
        f"local.batch_size = {batch:,} is a sampling rate of {largest:.2g} for the smallest client "
        f"({min(declared):,} examples) and {usual:.2g} for the median client: small clients get "
        f"the most noise{fix}"
    )


def privacy_warnings(federation: Federation) -> list[str]:
    """Return warnings about a δ that is too large, and about constants from private rows."""
    plans, lines = federation.plan.clients or (), list[str]()
    protects_clients = federation.experiment.release_kind.protects_client
    loose = clients_with_large_delta(
        [plan.delta for plan in plans],
        [plan.examples for plan in plans],
        protects_clients=protects_clients,
    )
    if loose:
        of, unit = f"examples for {clients_text(loose)}", "a whole example"
        if protects_clients:
            of, unit = "the number of clients", "everything of one client"
        lines.append(
            f"δ is not below 1 / {of}: such a δ allows publishing {unit}; choose a smaller "
            "privacy.delta"
        )
    if plans and "constants" in (federation.experiment.public_parts or {}):
        lines.append(
            "the constants of columns were read from the rows, and no ε covers that "
            "(data.dataset.constants: from_rows); before an ε is published, put public constants "
            "into data.dataset.columns and remove the key"
        )
    return lines


def _declared_sizes(experiment: Experiment, sizes: Sequence[int]) -> Sequence[int]:
    """Return the public client sizes that set sampling rates; empty if `batch_size` sets none."""
    privacy = experiment.privacy
    if (
        privacy is None
        or not privacy.release_kind.draws_batches
        or privacy.sampling.rate is not None
    ):
        return ()
    declared = privacy.adjacency.declared_examples
    return sizes if declared is None else [declared] * len(sizes)


@dataclass(frozen=True)
class Overdrawn:
    """A client whose planned steps cost more than its privacy budget.

    Attributes:
        client: the client's number.
        plan: the client's privacy plan.
        last_round: the last round in which the client can take a step; 0 if there is none.
    """

    client: int
    plan: PrivacyPlan
    last_round: int


def last_round(federation: Federation, client: int) -> int:
    """Return the last round in which a client's budget still covers a step, if no round fails.

    The result is 0 if the budget covers no step.
    """
    plan, scheduled = federation.plan, federation.plan.participation.rounds_of(client)
    count = len(scheduled)
    if plan.clients is not None:
        count = plan.steps.rounds_in(client, plan.clients[client].steps_to_take)
    return scheduled[count - 1] if count else 0


def refuse_overspending(federation: Federation) -> None:
    """Check, before training, that the clients' privacy budgets cover the plan.

    With `privacy.on_exhausted: refuse`, the budget of every client must cover all its planned
    steps. Otherwise the budget of at least one client must cover one step.

    Raises:
        PrivacyBudgetError: the budgets do not suffice; the message says how many rounds the budget
            covers.
    """
    privacy = federation.experiment.privacy
    overdrawn = [
        Overdrawn(client, plan, last_round(federation, client))
        for client, plan in enumerate(federation.plan.clients or ())
        if plan.steps_to_take < plan.planned_steps
    ]
    if privacy is None or not overdrawn:
        return
    if privacy.on_exhausted == "refuse":
        raise PrivacyBudgetError(_refusal(federation, overdrawn))
    if all(plan.steps_to_take == 0 for plan in federation.plan.clients or ()):
        raise PrivacyBudgetError(
            f"no client can take a single step: {_spending(federation, overdrawn[0], 1)}; raise "
            "target_epsilon, delta or noise_multiplier"
        )


def _refusal(federation: Federation, overdrawn: Sequence[Overdrawn]) -> str:
    worst = min(overdrawn, key=lambda client: client.last_round)
    others = f" ({len(overdrawn)} clients exceed their budgets)" if len(overdrawn) > 1 else ""
    rounds = min(_whole_rounds(federation, client) for client in overdrawn)
    fits = (
        f"at most {rounds} of {federation.experiment.federation.rounds} rounds fit every budget: "
        f"set federation.rounds={rounds}"
        if rounds
        else "not even one round fits every budget: raise target_epsilon or noise_multiplier"
    )
    spending = _spending(federation, worst, worst.plan.planned_steps)
    return f"a privacy budget forbids this plan: {spending}{others}; {fits}{_way_out(federation)}"


def _whole_rounds(federation: Federation, overdrawn: Overdrawn) -> int:
    """Return the largest number of rounds after which the client's budget is not exceeded."""
    plan, client = federation.plan, overdrawn.client
    whole = plan.steps.whole_rounds_in(client, overdrawn.plan.steps_to_take)
    return plan.participation.rounds_of(client)[whole] - 1


def _way_out(federation: Federation) -> str:
    """Return the second fix that a message offers; correlated noise is charged per whole run."""
    privacy = federation.experiment.privacy
    if privacy is not None and privacy.noise_correlation.name != "none":
        return ", or leave noise_multiplier out, which calibrates it for you"
    return ", or let clients leave when their budget is spent with privacy.on_exhausted=withdraw"


def _spending(federation: Federation, overdrawn: Overdrawn, steps: int) -> str:
    privacy = federation.experiment.privacy
    if privacy is None:
        raise ValueError("a federation without privacy spends nothing")
    plan = overdrawn.plan
    epsilon = Accounting.of(privacy, plan.delta).epsilon(plan.charges(0, steps))
    return (
        f"{steps} step{'s' if steps > 1 else ''} of client {overdrawn.client} with "
        f"noise_multiplier {plan.noise_multiplier:.4g} would spend ε = "
        f"{epsilon_text(epsilon)} at δ = {plan.delta:g}, and its target_epsilon is "
        f"{plan.target_epsilon:g}"
    )
