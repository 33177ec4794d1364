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
fixed_limit = partial(TABLE.fixed, "limit", "limit")

fixed_limit(
    "tuning_not_charged",
    "Tuning runs are not charged",
    "Tuning runs on the same data are not charged: every run spends privacy, and this account "
    "covers one run only.",
)
TABLE.fixed(
    "limit",
    "warning",
    "constants_from_rows",
    "Constants of columns were read from the rows",
    "The constants of the table's columns (ranges, categories, values of gaps) were read from the "
    "rows, as the experiment declares. No ε here covers what they reveal. The stated ε is that of "
    "training alone, as if the constants were public knowledge.",
    holds=lambda facts: facts.has_constants_from_rows,
)


@limit(
    "No guarantee against the server",
    holds=is_charged,
    when=lambda facts: facts.trust.trust == "central",
)
def trusted_server(facts: Facts) -> str:
    """Return the sentence saying that central trust has no guarantee against the server."""
    noun = "votes" if facts.counts_votes else "updates"
    seen = "single" if facts.secure_aggregation is None else "sums of"
    return (
        f"The server is trusted: it sees {seen} {noun} without noise. No ε of this run covers what "
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


@limit("Clients with far more examples than declared", when=lambda facts: facts.sizes_are_declared)
def largest_clients(facts: Facts) -> Said:
    """Return the sentences saying up to which private size of a client ε holds."""
    most = most_examples(min(client.examples for client in facts.clients))
    return (
        f"The guarantee is for clients of at most {most:,} examples, a public limit that follows "
        "from the declared size: the rounding of sums is charged up to it. A client that holds "
        "more is refused before it is charged. Its failure tells that it does, and no ε includes "
        "this."
    ), {"most_examples": most}


fixed_limit(
    "sizes_excluded",
    "Sizes of clients are not covered",
    "Clients are weighted by examples, which follows from the number of a client's examples. These "
    "numbers are treated as public facts that were fixed before the run: no ε covers them.",
    when=lambda facts: facts.protects_clients and facts.trust.weighting == "examples",
)


@limit("No amplification is claimed", when=lambda facts: facts.trust.participation_rate is None)
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


fixed_limit(
    "seeded_noise",
    "The noise is simulation grade",
    "The noise is computed from a seed, so that the simulation is reproducible. It gives no "
    "protection against anyone who knows the seed, and the settings of this run contain it.",
    holds=lambda facts: facts.has_charges and facts.mechanism.noise == "seeded",
)
fixed_limit(
    "secure_noise",
    "The noise cannot be repeated",
    "Batches and noise come from the operating system's random number generator. Neither they nor "
    "this run can be repeated.",
    holds=lambda facts: facts.has_charges and facts.mechanism.noise == "secure",
)


@limit("Finite precision")
def floating_point(facts: Facts) -> Said:
    """Return the sentences on finite precision: which of its effects ε includes."""
    slack = facts.mechanism.slack or Slack(math.inf, 1.0)
    simulated = ", which seeded noise simulates" if facts.mechanism.noise == "seeded" else ""
    text = (
        "Every release is made of integers: sums rounded to a public grid, and noise on the same "
        "grid. The noise multipliers of the ledger include the cost of this grid. ε includes the "
        f"cost of the noise sampler{simulated}: {slack.epsilon:.2g} at most "
        "(docs/explain/proofs.md). "
    )
    if of_sums(facts):
        text += "Integers of one grid add up exactly, so a sum has the noise of all its clients. "
    if facts.kind.draws_batches:
        text += "The proof assumes that what an example adds depends only on the model and the "
        text += "example; a test before the first round checks this. "
    return f"{text}No ε covers what timing reveals.", slack._asdict()


fixed_limit(
    "error_messages",
    "Failures are not covered",
    "Whether a client fails, and its error message, may depend on its examples. Both reached the "
    "server and this report; no ε includes them.",
    holds=lambda facts: facts.is_private and facts.run.lost_updates > 0,
)


@limit(
    "The run did not finish", holds=is_private, when=lambda facts: facts.run.status != "completed"
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


fixed_limit(
    "parties_on_one_host",
    "Non-collusion is simulated",
    "All parties of secure aggregation ran in one simulation. Every message of the protocol was "
    "real; that its parties do not collude was only simulated.",
    holds=lambda facts: facts.hides_updates,
    when=lambda facts: bool((facts.secure_aggregation or {}).get("simulated_non_collusion")),
)
fixed_limit(
    "unseen_updates",
    "Updates are not checked",
    "Secure aggregation gives no protection against clients that send false updates: the server "
    "cannot inspect a single update.",
    holds=lambda facts: facts.hides_updates,
)
