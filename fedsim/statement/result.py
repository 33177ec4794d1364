"""Sentences on a run's result: ε spent, bounds on attacks, secure aggregation, budgets, checks."""

import math
from functools import partial

from fedsim.core.formatting import (
    clients_text,
    count_text,
    delta_text,
    epsilon_text,
    percent_text,
    range_text,
)
from fedsim.statement.facts import Facts, spread_of
from fedsim.statement.sentence import Said, StatementTable, is_private, question_of, view_of

TABLE = StatementTable()
budget = partial(TABLE.sentence, "budget", "fact")
attack = partial(TABLE.sentence, "attack", "claim")
threat_model = partial(TABLE.sentence, "threat model", "fact")


@TABLE.sentence(
    "delta", "fact", "Why this δ", when=lambda facts: not facts.clients_with_large_delta
)
def delta_below_one_in_n(facts: Facts) -> Said:
    """Return the sentences saying that every client's δ is below 1 / its number of examples."""
    largest = max(client.delta * client.examples for client in facts.clients)
    if facts.protects_clients:
        largest = facts.delta * len(facts.clients)
        text = (
            "δ is below 1 / the number of clients: δ · clients is at most {}. With this "
            "probability, δ alone would allow to publish everything of one client."
        )
    elif facts.sizes_are_declared:
        text = (
            "Every client's δ is below 1 / its declared examples: δ · declared examples is at "
            "most {}. The real number is private, and this says nothing about a client "
            "that holds more than declared: let privacy.adjacency.declared_examples be no less "
            "than any client's examples. δ · examples is the probability with which δ alone "
            "would allow a client to publish one of them."
        )
    else:
        text = (
            "Every client's δ is below 1 / examples: δ times its number of examples is at most {}. "
            "With this probability, δ alone would allow a client to publish one of its examples."
        )
    text = f"{text.format(percent_text(largest))} Keep it far below 100%."
    return text, {"largest_delta_times_examples": largest}


@TABLE.sentence(
    "delta", "warning", "δ is too large", when=lambda facts: bool(facts.clients_with_large_delta)
)
def delta_too_large(facts: Facts) -> Said:
    """Return the sentences saying that a client's δ is at least 1 / its number of examples."""
    clients = facts.clients_with_large_delta
    count = "the number of clients"
    publisher = "a federation that publishes everything of one client"
    if not facts.protects_clients:
        count = f"examples for {clients_text(clients)}"
        publisher = "a client that publishes one of its examples"
    return (
        f"δ is not below 1 / {count}. With a δ this large, {publisher}, chosen at random, would "
        "satisfy the definition. Choose a smaller privacy.delta."
    ), {"clients": list(clients)}


@TABLE.sentence("result", "fact", "Every client, and the federation")
def spread(facts: Facts) -> Said:
    """Return the sentence on the largest ε (the guarantee), and the median and smallest ε."""
    values = spread_of([client.epsilon for client in facts.clients])
    texts = {name: epsilon_text(value) for name, value in values.items()}
    return (
        f"The guarantee for all clients is the largest ε of "
        f"{count_text(len(facts.clients), 'client')}: ε = {texts['max']} of client "
        f"{facts.worst.client}. The median ({texts['median']}) and the minimum ({texts['min']}) "
        "are statistics, not guarantees."
    ), values


@attack(
    "What an attacker can gain",
    when=lambda facts: bool(facts.profile and facts.attack and facts.attack.covers(facts.profile)),
)
def attack_bound(facts: Facts) -> Said:
    """Return the sentences on the largest true-positive rate of membership inference."""
    bounds = facts.attack.table if facts.attack else ()
    (rate, top), *rest = [(f"{100 * rate:.4g}%", percent_text(bound)) for rate, bound in bounds]
    others = "; ".join(f"at {rate}, at most {top}" for rate, top in rest)
    reach = "Each is the largest such bound of any client, from the client's whole curve δ(ε)."
    if len(facts.clients) == 1:
        reach = "This follows from the client's whole curve δ(ε)."
    elif len(tied := facts.worst_clients) > 1:
        reach += f" The largest ε is that of {clients_text(tied)}; their curves may cross."
    return (
        f"An attacker sees {view_of(facts).sees}, and guesses {question_of(facts)}. At a "
        f"false-positive rate of {rate}, the true-positive rate is at most {top}; {others}. {reach}"
    ), {
        "true_positive_bounds": [
            {"false_positive_rate": rate, "bound": bound} for rate, bound in bounds
        ],
        "clients_with_largest_epsilon": list(facts.worst_clients),
    }


@attack("As one Gaussian", when=lambda facts: bool(facts.profile and facts.profile.mu is not None))
def gaussian_bound(facts: Facts) -> Said:
    """Return the sentence on the Gaussian-DP parameter μ, which bounds every attack's rates."""
    profile = facts.profile
    values = {"mu": profile.mu, "slack": profile.slack} if profile else {}
    others = "" if len(facts.clients) == 1 else " The μ of another client may be larger."
    return (
        f"With μ = {epsilon_text(values['mu'])}, no attack on client {facts.worst.client} has a "
        f"true-positive rate more than {delta_text(values['slack'])} above that of the best test "
        "that distinguishes two normal distributions whose means are μ standard deviations apart. "
        f"This is proved from the curve δ(ε), not by a fit or a central limit theorem.{others}"
    ), values


_NOT_DP = "Secure aggregation is not differential privacy: "
_ON_ITS_OWN = f"{_NOT_DP}the ε of each client comes from its own noise and is not lowered by it."
_ROLES = {  # by trust model; `_ON_ITS_OWN` for any other one
    "distributed": f"{_NOT_DP}it hides the upload of each client, so that the noise of the other "
    "clients of a sum protects this upload as well. The guarantee against an observer of sums "
    "needs secure aggregation; the guarantee against the server does not.",
    "central": f"{_NOT_DP}the noise comes from the server, and no ε is lowered by the protocol.",
}


@threat_model("Secure aggregation", holds=lambda facts: facts.hides_updates)
def secure_aggregation(facts: Facts) -> Said:
    """Return the sentences on what the server sees, and whom one must trust for that."""
    recorded = dict(facts.secure_aggregation or {})
    names = ("trust", "parties", "rounds", "encoding")
    trust, parties, rounds, encoding = (recorded.get(name) or {} for name in names)
    sums = [f"the {view}" for view in recorded.get("server_view", ()) if view.startswith("sum of ")]
    text = (
        f"Updates were summed by the protocol {recorded.get('protocol')}: the server saw "
        f"{', '.join(sums) or 'sums only'}, the participants and their timing, but no single "
        "update."
    )
    if "privacy_requires" in trust:
        text += f" This requires: {trust['privacy_requires']}."
    if trust.get("forged_clients") == "undetected":
        text += " The protocol only counts the clients of a sum: a server that invents clients can "
        text += "open a sum with a single real client."
    if survivors := parties.get("survivors_per_round"):
        opened = count_text(len(survivors), "sum")
        text += f" {opened} of {range_text(survivors)} clients were opened."
    if aborted := rounds.get("aborted"):
        text += f" {count_text(aborted, 'round')} could not be opened and remain charged."
    if encoding and facts.trust.trust == "local":
        error = delta_text(encoding["max_abs_error"])
        text += " Every mean equals the mean of the quantised updates bit for bit. It differs from "
        text += f"the mean in real numbers by at most {error} in each coordinate."
    return f"{text} {_ROLES.get(facts.trust.trust, _ON_ITS_OWN)}", recorded


@threat_model(
    "Secure aggregation without cryptography",
    holds=lambda facts: facts.secure_aggregation is not None and not facts.hides_updates,
)
def nothing_hidden(facts: Facts) -> Said:
    """Return the sentence saying that secure aggregation ran without cryptography."""
    recorded = facts.secure_aggregation or {}
    return (
        f"Updates were quantised and summed in plaintext (protocol {recorded.get('protocol')}, for "
        f"comparison only): the server saw each of them. {_ON_ITS_OWN}"
    ), recorded


def _targets(facts: Facts) -> list[float]:
    """Return the target ε of every client that has one."""
    targets = [client.target_epsilon for client in facts.clients]
    return [target for target in targets if target is not None and math.isfinite(target)]


@TABLE.sentence(
    "budget",
    "warning",
    "A budget was exceeded",
    holds=is_private,
    when=lambda facts: bool(facts.clients_over_target),
)
def targets_exceeded(facts: Facts) -> Said:
    """Return the sentence saying that some clients spent more than their target ε."""
    clients = facts.clients_over_target
    return f"The target ε was exceeded by {clients_text(clients)}.", {"clients": list(clients)}


@budget("Budgets", when=lambda facts: bool(_targets(facts)) and not facts.clients_over_target)
def targets_kept(facts: Facts) -> Said:
    """Return the sentence saying that no client spent more than its target ε."""
    targets = _targets(facts)
    who = "Every client" if len(targets) == len(facts.clients) else "Each of them"
    return (
        f"{count_text(len(targets), 'client')} had a target ε of {range_text(targets)}. "
        f"{who} stayed within its target."
    ), {"clients": len(targets), "smallest": min(targets), "largest": max(targets)}


TABLE.fixed(
    "budget",
    "fact",
    "no_targets",
    "Budgets",
    "The noise multiplier was given without a target ε: no budget limited the spend.",
    holds=is_private,
    when=lambda facts: not _targets(facts) and facts.mechanism.target_rho is None,
)


@budget("Withdrawals", holds=is_private, when=lambda facts: bool(facts.withdrawn_clients))
def withdrawals(facts: Facts) -> Said:
    """Return the sentence on the clients that withdrew because their budget was spent."""
    withdrawn = facts.withdrawn_clients
    rounds = {
        str(c.client): c.withdrawn_round for c in facts.clients if c.withdrawn_round is not None
    }
    return (
        f"{count_text(len(withdrawn), 'client')} withdrew before the end because the budget "
        f"was spent: {clients_text(withdrawn)}. Budgets depend on settings alone, so a "
        "withdrawal reveals nothing about examples."
    ), {"rounds": rounds}


@budget(
    "Lost updates stay charged", holds=is_private, when=lambda facts: facts.run.lost_updates > 0
)
def lost_updates(facts: Facts) -> Said:
    """Return the sentence on updates that never reached the average; their charges remain."""
    return (
        f"{count_text(facts.run.lost_updates, 'update')} never reached the average. A charge is "
        "written before training starts and is never taken back. Every ε therefore includes each "
        "lost update that was charged."
    ), {"updates": facts.run.lost_updates}


@TABLE.sentence("data access", "fact", "Access to private data in this run", holds=is_private)
def data_access(facts: Facts) -> str:
    """Return the sentence saying for which purposes the clients' examples were read."""
    kind = facts.kind
    return (
        f"Clients' examples were read for {kind.reads} only, and {kind.charged} is in the ledger. "
        "The metrics are those of the global model on the server's test set, which counts as "
        "public. If it is not public, the metrics reveal information about it."
    )


@TABLE.sentence(
    "recomputation", "fact", "Ledger", holds=is_private, when=lambda facts: facts.digest is not None
)
def ledger(facts: Facts) -> Said:
    """Return the sentence on where charges are recorded, with the digest of all ledgers."""
    who = "Before a client trains in a round, it writes the round's privacy cost to ledger.jsonl."
    if facts.trust.participation_rate is not None:
        who = "The server writes every client's charge to ledger.jsonl before it adds noise."
    if facts.trust.trust == "distributed":
        who += " A record holds the cost against each of the two observers."
    return (
        f"{who} Records are chained by SHA-256. The last hash of a client is its ledger_head; "
        f"the digest of all these is {facts.digest}. In the run directory, "
        "`fedsim verify .` recomputes every ε and every hash."
    ), {"digest": facts.digest, "command": "fedsim verify ."}
