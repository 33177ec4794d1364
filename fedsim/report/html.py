"""The report of a run: one HTML file, readable offline, on paper, on a phone and without scripts.

It is made from the files of the run directory alone and can be rewritten at any time; the same
files give the same bytes. Its only script is inline. The page's security policy names the script's
hash, so that no other script can run, even if text from a file should slip through the escaping.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedsim.core.formatting import delta_text, epsilon_text, least_epsilon_text, percent_text
from fedsim.core.metrics import metric_name
from fedsim.report import overview
from fedsim.report.client_table import MAX_BARS, ClientTable, client_table, plain_table
from fedsim.report.contents import RunContents, read_contents
from fedsim.report.plots import draw_attack, draw_profile, draw_spend, narrow_range
from fedsim.report.recompute import recipe
from fedsim.report.scores import scores_context
from fedsim.report.sections.answers import answers_context
from fedsim.report.sections.client_data import client_data_context, held_out_accuracies
from fedsim.report.sections.curves import cost_drawings, round_drawings, spends_of
from fedsim.report.sections.experiment import experiment_rows
from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import list_again
from fedsim.statement import Facts, Sentence, clients_text, statement_of
from fedsim.statement.guarantee import certificates_of, is_plain
from fedsim.statement.observers import OBSERVER_NAMES, question_of, view_of
from fedsim.statement.result import attack_bound

_TITLES = {
    "threat model": "Threat model",
    "unit": "Unit of privacy",
    "adjacency": "Neighbours",
    "mechanism": "Mechanism",
    "sampling": "Sampling",
    "accounting": "Accounting",
    "delta": "Choice of δ",
    "result": "Result",
    "attack": "Meaning",
    "budget": "Budgets",
    "data access": "Access to data",
    "recomputation": "Evidence",
}


def guarantees(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the sentences of the guarantee: claims only, never a warning."""
    return [s for s in sentences if s.point == "guarantee" and s.kind == "claim"]


def warnings(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the warnings."""
    return [sentence for sentence in sentences if sentence.kind == "warning"]


def limits(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the limits of the guarantee."""
    return [sentence for sentence in sentences if sentence.kind == "limit"]


def points(sentences: Sequence[Sentence]) -> list[tuple[str, list[Sentence]]]:
    """Return the other points of the statement, each with its sentences, in their order."""
    found: dict[str, list[Sentence]] = {}
    for sentence in sentences:
        if sentence.point in _TITLES and sentence.kind in ("claim", "fact"):
            found.setdefault(sentence.point, []).append(sentence)
    return [(title, found[point]) for point, title in _TITLES.items() if point in found]


_HERE = Path(__file__).parent
_MAX_SETTINGS_CHARACTERS = 30_000


def write_report(directory: RunDirectory) -> None:
    """Write `report.html` from the other files of a run directory, and list it in the manifest.

    Raises:
        RunDirectoryError: the run has no result files.
    """
    directory.write_text("report.html", render_report(read_contents(directory)))
    list_again(directory, "report.html")


def render_report(contents: RunContents) -> str:
    """Return the report as HTML; all text from files is escaped."""
    page = page_templates().get_template("report.html.jinja").render(_context(contents))
    # Error messages may hold lone surrogates, from undecodable file names for example.
    return page.encode(errors="replace").decode()


@cache  # compiled once for all pages of a process
def page_templates() -> jinja2.Environment:
    """Return the templates of this directory, with escaping and the filter `typeset`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["typeset"] = typeset
    return environment


def _context(contents: RunContents) -> dict[str, Any]:
    facts = contents.facts
    sentences = statement_of(facts)
    incidents = overview.incidents(contents)
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    table = _table(contents)
    return {
        "name": contents.summary["name"],
        "status": contents.summary["status"],
        "reason": contents.summary["reason"],
        "cards": overview.cards(contents),
        "private": facts.is_private,
        "guarantees": guarantees(sentences),
        "warnings": warnings(sentences),
        "limits": limits(sentences),
        "points": points(sentences),
        "attack": _attack(facts),
        "experiment": experiment_rows(contents),
        "curves": round_drawings(contents),
        "costs": cost_drawings(contents),
        "main_metric": f"Test {metric_name(next(iter(contents.metrics), 'metric'))}",
        "noise_is_drawn": any(row.get("noise_norm") for row in contents.rounds),
        "phases": overview.phases(contents),
        "scores": scores_context(contents.scores),
        "client_data": client_data_context(contents),
        "answers": answers_context(contents),
        "personal": overview.personal_table(contents),
        "personal_note": None if contents.personal is None else contents.personal["note"],
        "spend_plot": _spend_plot(contents),
        "spend_caption": _spend_caption(contents),
        "ties": _ties(contents),
        "bounded": facts.is_bounded,
        "certificates": certificates_of(facts),
        "table": table,
        "num_clients": len(contents.clients),
        "recipe": recipe(contents),
        "incidents": incidents[: overview.MAX_INCIDENTS],
        "num_incidents": len(incidents),
        "settings": contents.experiment[:_MAX_SETTINGS_CHARACTERS],
        "settings_cut": len(contents.experiment) > _MAX_SETTINGS_CHARACTERS,
        "environment": overview.environment_rows(contents),
        "script": Markup(script),
        "script_hash": _hash(script),
    }


def typeset(text: str) -> Markup:
    """Return a sentence as HTML: escaped, `commands` as code, indices below, pairs unbroken."""
    escaped = str(escape(text))
    escaped = re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped)
    escaped = escaped.replace("ε_k", "ε<sub>k</sub>")
    escaped = escaped.replace("1 / ", "1\u00a0/\u00a0")
    return Markup(re.sub(r"([εδμzqC]) ([=≤]) ", "\\1\u00a0\\2\u00a0", escaped))


def _hash(script: str) -> str:
    """Return the hash by which a security policy names a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _attack(facts: Facts) -> dict[str, Any] | None:
    """Return the attack bounds as a table and two drawings; None without a guarantee."""
    profile, attack = facts.profile, facts.attack
    if not attack_bound.holds(facts) or profile is None or attack is None:
        return None
    if not profile.curve:
        return None
    return {
        "client": profile.client,
        "sees": view_of(facts).sees,
        "question": question_of(facts),
        "tied": _tied(facts),
        "rows": [(f"{100 * rate:g}%", percent_text(bound)) for rate, bound in attack.table],
        "epsilon": epsilon_text(profile.epsilon),
        "delta": delta_text(profile.delta),
        "profile_plot": draw_profile(profile),
        "attack_plot": draw_attack(attack),
    }


def _tied(facts: Facts) -> str | None:
    """Return the clients that share the largest ε, in words; None for one client."""
    tied = facts.worst_clients
    if len(tied) < 2:
        return None
    if len(tied) == len(facts.clients):
        return f"all {len(tied):,} clients"
    return clients_text(tied)


def _table(contents: RunContents) -> ClientTable | None:
    """Return the table of clients; None for a federation without clients."""
    facts, lost = contents.facts, overview.lost_updates(contents)
    if not contents.clients:
        return None
    if facts.is_private:
        return client_table(facts, contents.clients, lost)
    rounds, scores = overview.rounds_of_clients(contents), held_out_accuracies(contents)
    return plain_table(contents.clients, rounds, lost, scores)


def _ties(contents: RunContents) -> str | None:
    """Return what all clients spent where it is nearly the same: no figure is needed then."""
    facts = contents.facts
    if not facts.is_bounded or not facts.has_charges:
        return None
    shared = narrow_range(spends_of(contents))
    if shared is None:
        return None
    who, against = f"all {len(contents.clients):,} clients", _against(facts)
    if len(facts.worst_clients) == len(facts.clients):
        return f"ε ties: {who} spent ε = {epsilon_text(shared[1])}{against}."
    low, high = least_epsilon_text(shared[0]), epsilon_text(shared[1])
    return f"ε nearly ties: {who} spent between ε = {low} and {high}{against}."


def _spend_plot(contents: RunContents) -> Markup | None:
    facts = contents.facts
    if not facts.is_private or not facts.has_charges or facts.objections:
        return None
    spends = spends_of(contents)
    return None if narrow_range(spends) is not None else draw_spend(spends)


def _spend_caption(contents: RunContents) -> str:
    targets = {spend.get("target_epsilon") for spend in contents.clients}
    what = f"ε of each client{_against(contents.facts)}"
    if len(targets) > 1 and len(contents.clients) <= MAX_BARS:
        return f"{what}; a vertical mark is its own target"
    return what


def _against(facts: Facts) -> str:
    """Return the observer of the clients' ε; nothing in local trust."""
    return "" if is_plain(facts) else f", against {OBSERVER_NAMES[facts.trust.observers[0]]}"
