"""The report of a run: one HTML file, readable offline, on paper, on a phone and without scripts.

The report is made from the files of the run directory alone, and can be made again at any time; the
same files give the same bytes. The page contains one script. The content security policy of the
page allows only a script with this hash, so no other script can run, even by mistake.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedsim.accountant.sampler_slack import sampler_slack
from fedsim.core.formatting import clients_text, metric_text, percent_text
from fedsim.core.metrics import metric_name
from fedsim.report import overview
from fedsim.report.client_data import answers_context, client_data_context
from fedsim.report.client_table import client_table, incidents
from fedsim.report.contents import RunContents, read_contents, recall_text
from fedsim.report.drawing import inline_svg
from fedsim.report.experiment import experiment_rows
from fedsim.report.overview import cost_drawings, round_drawings
from fedsim.report.plots import MAX_BARS, attack_chart, narrow_range, profile_chart, spend_chart
from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import list_again
from fedsim.runs.recorded_figures import PERSONALIZATION
from fedsim.statement import Facts, statement_of
from fedsim.statement.guarantee import against_text, certificates_of
from fedsim.statement.result import attack_bound
from fedsim.statement.sentence import OBSERVER_NAMES, question_of, view_of

_MAX_EVENTS = 40  # a longer script is unreadable; privacy.json has the same events for programs
_RELATIONS = {"zero_out": "REPLACE_SPECIAL", "add_remove": "ADD_OR_REMOVE_ONE"}


class _NoCounterpartError(ValueError):
    """dp-accounting has no counterpart of an event in the ledger."""


def recipe(contents: RunContents) -> dict[str, Any] | None:
    """Return a `script` that recomputes the federation's ε, the largest of any client.

    It is a Python script for the library dp-accounting; `client` and `ledger_head` are those of the
    client with this ε. The result is None without privacy, if nothing was spent, or if
    dp-accounting has no counterpart of the neighbours or of an event in the ledger.
    """
    spends = [spend for spend in contents.clients if spend["ledger"]]
    relation = _RELATIONS.get(contents.privacy["adjacency"] or "")
    if not contents.facts.is_private or not spends or relation is None:
        return None
    spend: Mapping[str, Any] = max(
        spends, key=lambda row: -1.0 if row["epsilon"] is None else row["epsilon"]
    )
    ledgers: list[tuple[list[tuple[str, int]], float | None, float | None]] = []
    for name in ("", "_against_server"):
        if ledger := spend.get(f"ledger{name}"):
            epsilon = spend.get(f"epsilon{name}")
            slack = None if epsilon is None else sampler_slack(epsilon, spend["delta"]).epsilon
            try:
                ledgers.append((_merged(ledger), epsilon, slack))
            except _NoCounterpartError:
                return None
    facts = {"spend": spend, "privacy": contents.privacy, "relation": relation}
    values = {**facts, "ledgers": ledgers, "observers": OBSERVER_NAMES}
    script = render_page("recipe.py.jinja", values).strip()
    return {"client": spend["client"], "ledger_head": spend.get("ledger_head"), "script": script}


def _merged(ledger: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return each distinct event as an expression, with its count; no ε depends on the order."""
    counts = Counter[str]()
    for entry in ledger:
        counts[_expression(entry["event"])] += entry["count"]
    if len(counts) > _MAX_EVENTS:
        raise _NoCounterpartError(f"{len(counts)} distinct events are too many for a script")
    return list(counts.items())


def _expression(event: dict[str, Any]) -> str:
    """Return an event as a dp-accounting expression, with all digits of its numbers."""
    match event:
        case {"type": "Gaussian", "noise_multiplier": noise}:
            return f"dp.GaussianDpEvent({float(noise)!r})"
        case {"type": "JointGaussian", "noise_multipliers": noises}:
            # All groups of parameters are one release: the script shows how their noise adds up.
            terms = " + ".join(f"{float(noise)!r}**-2" for noise in noises)
            return f"dp.GaussianDpEvent({'0.0' if 0.0 in noises else f'({terms})**-0.5'})"
        case {"type": "EpochShuffled", "event": inner}:
            return _expression(inner)  # each example is in one batch of the pass
        case {"type": "PoissonSampled", "sampling_rate": rate, "event": inner}:
            return f"dp.PoissonSampledDpEvent({float(rate)!r}, {_expression(inner)})"
        case {"type": "SelfComposed", "event": inner, "count": count}:
            return f"dp.SelfComposedDpEvent({_expression(inner)}, {int(count)})"
        case {"type": "Composed", "events": inner}:
            return f"dp.ComposedDpEvent([{', '.join(map(_expression, inner))}])"
        case {"type": "NonPrivate"}:
            return "dp.NonPrivateDpEvent()"
        case _:
            raise _NoCounterpartError(f"no counterpart for {event.get('type')!r}")


_HERE = Path(__file__).parent


def write_report(directory: RunDirectory) -> None:
    """Write `report.html` from the other files of a run directory, and list it in the manifest."""
    save_report(directory, render_report(read_contents(directory)))


def save_report(directory: RunDirectory, page: str) -> None:
    """Write a rendered report as `report.html` of a run directory, and list it in the manifest."""
    directory.write_text("report.html", page)
    list_again(directory, "report.html")


def render_report(contents: RunContents) -> str:
    """Return the report of a run as HTML; all text from files is escaped."""
    return render_page("report.html.jinja", _context(contents))


def render_page(template: str, context: Mapping[str, Any], *folders: Path) -> str:
    """Return a page as HTML; all text of the context is escaped.

    `template` is a file in one of `folders`, or else in the folder of the report.
    """
    page = _page_templates(*folders).get_template(template).render(context)
    # Error messages may hold lone surrogates, from undecodable file names for example.
    return page.encode(errors="replace").decode()


@cache  # compiled once for all pages of a process
def _page_templates(*folders: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _HERE], encoding="utf-8"),
        autoescape=True,
        optimized=False,  # an eighth of the time to compile, and pages are rendered once
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (typeset, clients_text, metric_name, metric_text, percent_text, recall_text)
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def _context(contents: RunContents) -> dict[str, Any]:
    facts = contents.facts
    shared = narrow_range(facts.clients)
    has_bars = facts.is_private and facts.has_charges and not facts.objections and shared is None
    targets = {client.target_epsilon for client in facts.clients}
    return {
        **headlines(contents),
        "facts": facts,
        "attack": _attack(facts),
        "experiment": experiment_rows(contents),
        "curves": round_drawings(contents),
        "costs": cost_drawings(contents),
        "main_metric": f"Test {metric_name(next(iter(contents.metrics), 'metric'))}",
        "noise_is_drawn": any(row.get("noise_norm") for row in contents.rounds),
        "phases": overview.phases(contents),
        "scores": contents.scores,
        "client_data": client_data_context(contents),
        "answers": answers_context(contents),
        "personal": contents.optional(PERSONALIZATION),
        "against": against_text(facts),
        "shared": shared if facts.is_bounded else None,
        "spend_plot": inline_svg(spend_chart(facts.clients)) if has_bars else None,
        "has_marks": len(targets) > 1 and len(facts.clients) <= MAX_BARS,
        "num_certificates": len(certificates_of(facts)),
        "table": client_table(contents),
        "recipe": recipe(contents),
        "incidents": incidents(contents),
        "settings": contents.experiment_text,
        "environment": contents.environment,
        **script_context(_HERE / "report.js"),
    }


def headlines(contents: RunContents) -> dict[str, Any]:
    """Return the template values for the head of a page: summary, headline figures, statement."""
    return {
        "summary": contents.summary,
        "cards": overview.cards(contents),
        "sentences": statement_of(contents.facts),
    }


def typeset(text: str) -> Markup:
    """Return a sentence as escaped HTML; "ε ≤ 8" stays on one line, and `code` becomes `<code>`."""
    escaped = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text)))
    escaped = escaped.replace("ε_k", "ε<sub>k</sub>").replace("1 / ", "1\u00a0/\u00a0")
    return Markup(re.sub(r"([εδμzqC]) ([=≤]) ", "\\1\u00a0\\2\u00a0", escaped))


def script_context(path: Path) -> dict[str, Any]:
    """Return template values: `script`, the script of a page, and `script_hash`, its SHA-256."""
    script = path.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": Markup(script), "script_hash": f"sha256-{digest}"}


def _attack(facts: Facts) -> dict[str, Any] | None:
    """Return the words and drawings of the bounds on attacks; None without a guarantee."""
    profile, attack = facts.profile, facts.attack
    if not attack_bound.holds(facts) or profile is None or attack is None or not profile.curve:
        return None
    return {
        "sees": view_of(facts).sees,
        "question": question_of(facts),
        "profile_plot": inline_svg(profile_chart(profile)),
        "attack_plot": inline_svg(attack_chart(attack)),
    }
