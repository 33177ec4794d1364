"""Sentences on the guarantee: against whom it holds, and what one ε protects.

A certificate is a pair (ε, δ) that a run guarantees against one adversary. A run may have several,
which hold at once. No sentence of the statement adds, averages or compares the ε of certificates.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedsim.accountant.trust import Observer
from fedsim.core.formatting import clients_text, count_text, delta_text, epsilon_text
from fedsim.statement.facts import Facts, Outcome
from fedsim.statement.privacy_file import Certificate
from fedsim.statement.sentence import (
    OBSERVER_NAMES,
    Holds,
    Said,
    StatementTable,
    core_text,
    is_charged,
    is_private,
    of_sums,
    view_of,
)

TABLE = StatementTable()
warning = partial(TABLE.sentence, "guarantee", "warning")
claim = partial(TABLE.sentence, "guarantee", "claim")
fixed_warning = partial(TABLE.fixed, "guarantee", "warning")
fixed_unit = partial(TABLE.fixed, "unit", "limit")


def _ends_as(outcome: Outcome, noise: str | None = None) -> Holds:
    """Return a condition on facts: their outcome and, if `noise` is given, source of noise."""
    return lambda facts: facts.outcome == outcome and noise in (None, facts.mechanism.noise)


# Exactly one of the first six sentences holds.

fixed_warning(
    "no_privacy",
    "No differential privacy",
    "This federation ran without differential privacy: anyone who sees a client's updates may "
    "learn anything about its examples.",
    holds=_ends_as("no privacy"),
)


@warning("ε is infinite", holds=_ends_as("infinite"))
def infinite_epsilon(facts: Facts) -> Said:
    """Return the sentence saying that there is no guarantee, because a client's ε is infinite."""
    unbounded = facts.unbounded_clients  # none where no client is known
    who = clients_text(unbounded).capitalize() if unbounded else "Some client"
    return (
        f"{who} released updates with too little noise for any bound: the ε of these updates "
        "is infinite, and so is the federation's. Anyone who sees these updates, or what is "
        "made from them, may learn anything about the examples behind them."
    ), {"clients": list(unbounded)}


@warning("No guarantee can be stated", holds=_ends_as("withheld"))
def withheld(facts: Facts) -> Said:
    """Return the sentence saying that ε is withheld, as the recorded facts do not support it."""
    return (
        f"An ε is reported for this run, but {'; '.join(facts.objections)}. No guarantee "
        "is stated; `fedsim verify` checks the run against its ledger."
    ), {"objections": list(facts.objections)}


TABLE.fixed(
    "guarantee",
    "claim",
    "nothing_released",
    "Nothing was released",
    "No client released an update, so no privacy was spent: ε = 0 for every client.",
    holds=_ends_as("nothing released"),
)


def _largest(facts: Facts) -> str:
    """Return the largest ε with its δ, in words."""
    at = f"δ = {delta_text(facts.delta)}"
    if len({client.delta for client in facts.clients}) > 1:
        at = f"δ ≤ {delta_text(facts.delta)}, each client having a δ of its own"
    return (
        f"The largest ε_k is {epsilon_text(facts.epsilon)} at {at}; this pair is the guarantee of "
        "the federation."
    )


def _pair(facts: Facts) -> Mapping[str, Any]:
    """Return the pair (ε, δ) that holds for every client, as values of a sentence."""
    return {"epsilon": facts.epsilon, "delta": facts.delta, "client": facts.worst.client}


@claim("Guarantee of the simulated mechanism", holds=_ends_as("bounded", noise="seeded"))
def simulated_guarantee(facts: Facts) -> Said:
    """Return the sentence on the guarantee of the mechanism that seeded noise simulates."""
    intro = "The mechanism that this run simulates has this guarantee"
    return f"{intro}: {core_text(facts)}. {_largest(facts)}", _pair(facts)


@claim("Guarantee", holds=_ends_as("bounded", noise="secure"))
def guarantee(facts: Facts) -> Said:
    """Return the sentence that states the guarantee of the run, if its noise is not seeded."""
    core = core_text(facts)
    return f"{core[0].upper()}{core[1:]}. {_largest(facts)}", _pair(facts)


@claim(
    "Guarantee against the server",
    holds=lambda facts: facts.is_private and of_sums(facts),
    when=lambda facts: facts.against_server is not None and facts.against_server.is_bounded,
)
def against_server(facts: Facts) -> Said:
    """Return the sentence on the ε that a client's own noise gives against the server."""
    other = facts.against_server or facts
    is_seeded = other.mechanism.noise == "seeded"
    each = "In the mechanism that this run simulates, each" if is_seeded else "Each"
    return (
        f"{each} client is also protected by its own share of the noise alone, whatever "
        "the other parties do, even if they all collude, invent clients or open single updates: "
        f"{core_text(other)}. The largest ε_k is {epsilon_text(other.epsilon)} at δ = "
        f"{delta_text(other.delta)}. Both guarantees hold at once, each against its own "
        "observer; never add or compare their ε."
    ), _pair(other)


fixed_warning(
    "no_server_guarantee",
    "No guarantee against the server",
    "No ε is stated against a server that sees single updates: the recorded shares of the noise "
    "support none. `fedsim verify` checks the run against its ledger.",
    holds=is_charged,
    when=lambda facts: of_sums(facts) and supported_epsilon(facts.against_server) is None,
)


@warning(
    "Clients without any part in the model",
    holds=is_private,
    when=lambda facts: bool(facts.run.absent_clients),
)
def absent_clients(facts: Facts) -> Said:
    """Return the sentence on clients that spent ε, but whose updates were all lost."""
    absent = facts.run.absent_clients
    whose = "its" if len(absent) == 1 else "their"
    return (
        f"{clients_text(absent).capitalize()} never took part: every update of {whose} rounds was "
        f"lost. The model has learned nothing from {whose} examples, and {whose} ε is spent all "
        "the same."
    ), {"clients": list(absent)}


@TABLE.sentence("threat model", "claim", "Against whom")
def threat_model(facts: Facts) -> str:
    """Return the sentences that say against whom the guarantee holds."""
    trust, uploads, sends = facts.trust, "updates", "send any model"
    if facts.counts_votes:
        uploads, sends = "votes", "ask any query"
    known = "and all participants"
    if trust.participation_rate is not None:
        known = "but not the participants of a round"
    text = f"{view_of(facts).adversary}. It knows every setting {known}"
    if trust.trust == "distributed":
        recorded = (facts.secure_aggregation or {}).get("trust") or {}
        requires = recorded.get("privacy_requires") or "its trust assumption is not recorded"
        text += (
            f". The guarantee relies on the parties of secure aggregation ({requires}), and on all "
            f"but {count_text(trust.colluding_clients or 0, 'client')} of each sum."
        )
    elif trust.trust == "central":
        text += (
            ", and may collude with all other clients. The server is trusted: it adds the noise."
        )
    else:
        text += f", may {sends}, and may collude with all other clients."
    return (
        f"{text} A client is trusted with its own examples: the guarantee covers its {uploads} and "
        "gives no protection from the client itself."
    )


_NOISE_OF_CLIENTS = {"local": "with its noise", "distributed": "with its share of the noise"}


@TABLE.sentence("threat model", "fact", "What is released", holds=is_private)
def released(facts: Facts) -> str:
    """Return the sentences that list what leaves a client."""
    trust = facts.trust
    mask = " (masked, so that only sums can be opened)" if facts.hides_updates else ""
    noise = _NOISE_OF_CLIENTS.get(trust.trust, "without noise")
    failed = "If a client fails, it also sends its error message."
    if facts.counts_votes:
        return (
            f"A client sends the votes of its teacher on public queries, {noise}{mask}. It "
            "also sends its settings and its ledger. Teachers, their training losses and all that "
            "they predict beside these votes stay on the clients. The student is trained on public "
            f"queries and the answers alone. {failed}"
        )
    upload, source, clipped = "its model", "these models", "clipped gradients"
    if "directions" in (facts.public_parts or {}):
        clipped = "clipped slopes along public directions"
        upload, source = f"its {clipped}, {noise}", "these slopes"
    if trust.trust != "local":
        clipped = "whole update" if facts.protects_clients else clipped
        upload = f"its {clipped} as integers on a public grid, {noise}"
        source = "these integers"
    if facts.hides_updates:
        source = "these sums"
    rounds = "is charged for" if trust.participation_rate is None else "takes part in"
    bound = ", its adapted clipping bound" if facts.mechanism.clip_words.adaptation else ""
    # Clients that are drawn in secret are charged by the server, and send no ledger.
    ledger = " and its ledger" if trust.participation_rate is None else ""
    return (
        f"After every round that it {rounds}, a client sends {upload}{mask}. It also sends its "
        f"settings{bound}{ledger}. The server computes the global models from {source} alone. "
        f"Per-example gradients, training losses and batch sizes stay on the client. {failed}"
    )


fixed_unit(
    "unit",
    "One training example, not one person",
    "The unit of privacy is one training example of one client. A person with several examples on "
    "one client is protected less. For a person with examples on several clients, the privacy "
    "losses of these clients accumulate. Neither case is computed here.",
    when=lambda facts: not facts.protects_clients,
)
fixed_unit(
    "client_unit",
    "Everything that one client has",
    "The unit of privacy is everything that one client has: all of its examples together, and "
    "their number. For a person with data on several clients, the privacy losses of these clients "
    "accumulate, which is not computed here. An ε of this unit and an ε of one example are not "
    "comparable.",
    when=lambda facts: facts.protects_clients,
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
    "zero-out adjacency, where one client votes for nothing, and under replacement, where "
    "everything that one client has is replaced; the charge covers both"
)


@TABLE.sentence("adjacency", "claim", "Neighbouring data sets")
def adjacency(facts: Facts) -> Said:
    """Return the sentences on the adjacency, its sensitivity, and what is public."""
    name, sensitivity = facts.mechanism.adjacency or "", facts.kind.sensitivity
    if facts.counts_votes:
        return (
            f"Two data sets are neighbours under {_VOTE_ADJACENCY}, and who takes part is public. "
            "The L2 sensitivity of the votes on a query is at most √2: another teacher moves two "
            "counts by 1, and a client that is zeroed out moves one count. All settings, the "
            "planned number of clients, the queries and the server's test set are public as well."
        ), {"adjacency": name, "sensitivity": sensitivity}
    if name == "replace_one":
        sensitivity = "2" if sensitivity == "1" else f"2{sensitivity}"
    values = {"adjacency": name, "sensitivity": sensitivity}
    if facts.protects_clients:
        taking_part = "public" if facts.trust.participation_rate is None else "secret"
        return (
            f"Two data sets are neighbours under {_CLIENT_ADJACENCIES[name]}, and who takes part "
            f"is {taking_part}. The L2 sensitivity of a sum of clipped updates is then at most "
            f"{sensitivity}. All settings, the planned number of clients and the server's test set "
            "are public as well."
        ), values
    return (
        f"Two data sets are neighbours under {_ADJACENCIES[name]}. The L2 sensitivity of "
        f"{facts.kind.sensitivity_of} is then at most {sensitivity}. All settings, the "
        "participation schedule, sampling rates, step counts and the server's test set are public "
        "as well."
    ), values


def certificates_of(facts: Facts) -> list[Certificate]:
    """Return the pair (ε, δ) against each adversary; an ε that the facts do not support is None."""
    observers = facts.trust.observers if facts.is_private else ()
    return [
        Certificate(against=name, epsilon=supported_epsilon(view), delta=facts.delta)
        for name, view in zip(observers, (facts, facts.against_server), strict=False)
    ]


def supported_epsilon(facts: Facts | None) -> float | None:
    """Return the largest ε of any client, or None if the recorded facts do not support it."""
    if facts is None or facts.outcome not in ("bounded", "nothing released"):
        return None
    return facts.epsilon


def stated_certificates(facts: Facts) -> list[Certificate]:
    """Return the certificates of a charged run whose ε the recorded facts support."""
    certificates = certificates_of(facts) if facts.has_charges else []
    return [one for one in certificates if one["epsilon"] is not None]


def is_plain(facts: Facts) -> bool:
    """Whether a run has local trust and the example as unit, so that ε can be quoted alone."""
    return facts.trust.trust == "local" and not facts.protects_clients


def against_text(facts: Facts) -> str:
    """Return the observer that the clients' ε is against, as text; "" if ε can be quoted alone."""
    return "" if is_plain(facts) else f", against {OBSERVER_NAMES[facts.trust.observers[0]]}"


def epsilon_heading(facts: Facts, observer: Observer) -> str:
    """Return the symbol of ε against an observer in tables of clients; "ε" in local trust."""
    return "ε" if facts.trust.trust == "local" else f"ε ({observer})"


def unit_text(facts: Facts) -> str:
    """Return what one ε protects: "one example", or "everything of one client"."""
    return "everything of one client" if facts.protects_clients else "one example"


def guarantee_words(facts: Facts) -> str:
    """Return the guarantee of a run in a few words, or the reason why it has none."""
    stated = [
        f"within ε = {epsilon_text(one['epsilon'])} at δ = {delta_text(one['delta'])}"
        + ("" if is_plain(facts) else f" against {OBSERVER_NAMES[one['against']]}")
        for one in stated_certificates(facts)
    ]
    match facts.outcome:
        case "no privacy":
            return "no differential privacy"
        case "nothing released":
            return "no update was released, and no privacy was spent"
        case "bounded":
            unit = "" if is_plain(facts) else f"for {unit_text(facts)}, "
            excluded = " (training alone: its constants came from the rows)"
            excluded = excluded if facts.has_constants_from_rows else ""
            return f"{unit}every client {', and '.join(stated)}{excluded}"
        case "infinite":
            unbounded = clients_text(facts.unbounded_clients)
            reason = f"no guarantee for the federation: ε = ∞ for {unbounded}"
        case "withheld":
            reason = f"no guarantee: {facts.objections[0]}"
    return f"{reason}; every client {stated[0]}" if stated else reason
