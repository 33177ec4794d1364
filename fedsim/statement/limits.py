"""Sentences on the limits of the guarantee: risks that the ε of a run does not include."""

import math
from functools import partial

from fedsim.accountant.sampler_slack import Slack
from fedsim.clients.mechanisms.conditions import most_examples
from fedsim.core.formatting import count_text
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Said, StatementTable, is_charged, is_private, of_sums
from fedsim.statement.trust_facts import UNMET_CONDITIONS, unmet_conditions

TABLE = StatementTable()
limit = partial(TABLE.sentence, "limit", "limit")


@TABLE.sentence(
    "limit",
    "warning",
    "Constants of columns were read from the rows",
    holds=lambda facts: facts.has_constants_from_rows,
)
def constants_from_rows(facts: Facts) -> str:
    """Return the warning that no ε covers column ranges and categories read from private rows."""
    return (
        "The constants of the table's columns (ranges, categories, values of gaps) were read "
        "from the rows, as the experiment declares. No ε here covers what they reveal. The "
        "stated ε is that of training alone, as if the constants were public knowledge."
    )


@limit(
    "No guarantee against the server",
    holds=is_charged,
    when=lambda facts: facts.trust.trust == "central",
)
def trusted_server(facts: Facts) -> str:
    """Return the sentence saying that central trust has no guarantee against the server."""
    noun = "votes" if facts.counts_votes else "updates"
    seen = f"{'single' if facts.secure_aggregation is None else 'sums of'} {noun}"
    return (
        f"The server is trusted: it sees {seen} without noise. No ε of this run covers what "
        "the server learns, or a party that can read its memory."
    )


@limit("Colluding clients", when=of_sums)
def collusion(facts: Facts) -> Said:
    """Return the sentences on how many clients may collude before a guarantee is lost."""
    trust = facts.trust
    names = ("min_clients", "colluding_clients", "honest_clients")
    allowed = (
        "No client of a sum may collude with its observer, or add no noise; a curious "
        "client, which knows its own noise, is not covered"
    )
    if trust.colluding_clients:
        allowed = (
            f"Up to {count_text(trust.colluding_clients, 'client')} of a sum may collude with its "
            "observer, or add no noise; every client knows its own noise, so a curious client "
            "counts as one of them"
        )
    return (
        f"{allowed}. The guarantee counts the noise of "
        f"{count_text(trust.honest_clients, 'honest client')} of a sum, and no sum of fewer than "
        f"{trust.min_clients} clients is opened. Where more clients collude, only the guarantee "
        "against the server holds."
    ), {name: getattr(trust, name) for name in names}


@limit("A server that departs from the protocol", when=of_sums)
def active_server(facts: Facts) -> Said:
    """Return the sentence saying whether secure sums keep their guarantee if the server cheats."""
    unmet = unmet_conditions(facts.secure_aggregation)
    if not unmet:
        return (
            "The guarantee against an observer of sums covers a server that departs from the "
            "protocol: keys are pinned, every upload is bound to one run, round, model, client "
            "set and plan of the noise, and enters one sum only. Every client must hold the plan "
            "that its operator reviewed; no file of the server proves this."
        ), {"unmet": unmet}
    return (
        "The guarantee against an observer of sums is for a server that follows the protocol. "
        "Against one that departs from it, only the guarantee against the server holds: "
        f"{'; '.join(UNMET_CONDITIONS[name] for name in unmet)}."
    ), {"unmet": unmet}


@limit(
    "Clients with far more examples than declared",
    when=lambda facts: facts.sizes_are_declared,
)
def largest_clients(facts: Facts) -> Said:
    """Return the sentences saying up to which private size of a client ε holds."""
    most = most_examples(min(client.examples for client in facts.clients))
    return (
        f"The guarantee is for clients of at most {most:,} examples, a public limit that follows "
        "from the declared size: the rounding of sums is charged up to it. A client that holds "
        "more is refused before it is charged. Its failure tells that it does, and no ε includes "
        "this."
    ), {"most_examples": most}


@limit(
    "Sizes of clients are not covered",
    when=lambda facts: facts.protects_clients and facts.trust.weighting == "examples",
)
def sizes_excluded(facts: Facts) -> str:
    """Return the sentence saying that weights by size make the size of each client public."""
    return (
        f"Clients are weighted by {facts.trust.weighting}, which follows from the number "
        "of a client's examples. These numbers are treated as public facts that were fixed "
        "before the run: no ε covers them."
    )


@limit(
    "No amplification is claimed",
    when=lambda facts: facts.trust.participation_rate is None,
)
def no_amplification(facts: Facts) -> str:
    """Return the sentence saying that ε uses no amplification by client selection or shuffling."""
    if facts.trust.trust == "distributed":
        return (
            "No amplification by client selection or shuffling is claimed. Secure aggregation "
            "lowers only the ε against an observer of sums, through the noise of other clients."
        )
    return (
        "No amplification by client selection, shuffling or secure aggregation is claimed: "
        "none of them lowers the ε of the guarantee."
    )


@limit(
    "The noise is simulation grade",
    holds=lambda facts: facts.mechanism.noise == "seeded" and facts.has_charges,
)
def seeded_noise(facts: Facts) -> str:
    """Return the sentence saying that anyone who knows the seed can remove the noise."""
    return (
        "The noise is computed from a seed, so that the simulation is reproducible. It gives no "
        "protection against anyone who knows the seed, and the settings of this run contain it."
    )


@limit(
    "The noise cannot be repeated",
    holds=lambda facts: facts.mechanism.noise == "secure" and facts.has_charges,
)
def secure_noise(facts: Facts) -> str:
    """Return the sentence saying that noise from the operating system cannot be repeated."""
    return (
        "Batches and noise come from the operating system's random number generator. Neither "
        "they nor this run can be repeated."
    )


@limit("Finite precision")
def floating_point(facts: Facts) -> Said:
    """Return the sentences on finite precision: which of its effects ε includes."""
    sums, examples, slack = "", "", facts.mechanism.slack or Slack(math.inf, 1.0)
    if facts.trust.trust == "distributed":
        sums = "Integers of one grid add up exactly, so a sum has the noise of all its clients. "
    if facts.kind.draws_batches:
        examples = (
            "The proof assumes that what an example adds depends only on the model and the "
            "example; a test before the first round checks this. "
        )
    simulated = ", which seeded noise simulates" if facts.mechanism.noise == "seeded" else ""
    return (
        "Every release is made of integers: sums rounded to a public grid, and noise on the same "
        "grid. The noise multipliers of the ledger include the cost of this grid. ε includes the "
        f"cost of the noise sampler{simulated}: {slack.epsilon:.2g} at most "
        f"(docs/explain/proofs.md). {sums}{examples}No ε covers what timing reveals."
    ), slack._asdict()


@limit("Failures are not covered", holds=is_private, when=lambda facts: facts.run.lost_updates > 0)
def error_messages(facts: Facts) -> str:
    """Return the sentence saying that ε does not cover failures of clients and error messages."""
    return (
        "Whether a client fails, and its error message, may depend on its examples. Both "
        "reached the server and this report; no ε includes them."
    )


@limit(
    "The run did not finish",
    holds=is_private,
    when=lambda facts: facts.run.status != "completed",
)
def unfinished(facts: Facts) -> Said:
    """Return the sentence saying that the run did not end as planned."""
    run = facts.run
    planned = "" if run.planned_rounds is None else f" of {run.planned_rounds:,} planned"
    return (
        f"The run is {run.status}, with {run.rounds:,}{planned} rounds finished. The statement "
        "covers the charges until then; continuing it spends more."
    ), {"status": run.status, "rounds": run.rounds}


@limit(
    "Personal models are not covered",
    holds=is_private,
    when=lambda facts: facts.personal_models is not None,
)
def personal_model(facts: Facts) -> str:
    """Return the sentence saying that personal models, made without noise, have no guarantee."""
    return (
        f"A client may make a personal model ({facts.personal_models}) from the final "
        "global model and its own examples, without noise. No ε covers a personal model or a "
        "score of it: keep both on the client. No upload, selection of clients or end of the "
        "run depends on them, so they change no ε of the federation."
    )


@limit(
    "Non-collusion is simulated",
    holds=lambda facts: facts.hides_updates,
    when=lambda facts: bool((facts.secure_aggregation or {}).get("simulated_non_collusion")),
)
def parties_on_one_host(facts: Facts) -> str:
    """Return the sentence saying that all parties of secure aggregation ran in one simulation."""
    return (
        "All parties of secure aggregation ran in one simulation. Every message of the "
        "protocol was real; that its parties do not collude was only simulated."
    )


@limit("Updates are not checked", holds=lambda facts: facts.hides_updates)
def unseen_updates(facts: Facts) -> str:
    """Return the sentence saying that the server cannot check updates that it cannot see."""
    return (
        "Secure aggregation gives no protection against clients that send false updates: the "
        "server cannot inspect a single update."
    )
