"""The report of a run: one HTML file, readable offline, on paper, on a phone and without scripts.

It is made from the files of the run directory alone and can be rewritten at any time; the same
files give the same bytes. Its only script is inline. The page's security policy names the script's
hash, so that no other script can run, even if text from a file should slip through the escaping.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from fedsim.core.formatting import delta_text, epsilon_text, metric_text, percent_text
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.report import overview
from fedsim.report.client_table import MAX_BARS, client_table, table_columns
from fedsim.report.contents import RunContents, read_contents
from fedsim.report.points import guarantees, limits, points, warnings
from fedsim.report.recompute import recipe
from fedsim.report.scores import scores_context
from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import list_again
from fedsim.statement import AttackBoundSentence, Facts, clients_text, statement_of
from fedsim.statement.certificate_words import is_plain
from fedsim.statement.certificates import OBSERVER_NAMES, certificates_of
from fedsim.statement.views import question_of, view_of

if TYPE_CHECKING:
    from fedsim.report.plots import Curve, Spend

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
    table = None
    if facts.is_private and facts.clients:
        table = client_table(facts, contents.clients, overview.lost_updates(contents))
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
        "curves": _curves(contents),
        "phases": overview.phases(contents),
        "scores": scores_context(contents.scores),
        "personal": overview.personal_table(contents),
        "personal_note": None if contents.personal is None else contents.personal["note"],
        "spend_plot": _spend_plot(contents),
        "spend_caption": _spend_caption(contents),
        "columns": table_columns(facts),
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
    if not AttackBoundSentence.holds(facts) or profile is None or attack is None:
        return None
    if not profile.curve:
        return None
    from fedsim.report.profile_plots import draw_attack, draw_profile

    return {
        "client": profile.client,
        "sees": view_of(facts).sees,
        "question": question_of(facts),
        "tied": clients_text(facts.worst_clients) if len(facts.worst_clients) > 1 else None,
        "rows": [(f"{100 * rate:g}%", percent_text(bound)) for rate, bound in attack.table],
        "epsilon": epsilon_text(profile.epsilon),
        "delta": delta_text(profile.delta),
        "profile_plot": draw_profile(profile),
        "attack_plot": draw_attack(attack),
    }


def _curves(contents: RunContents) -> list[tuple[str, "Markup"]]:
    """Return captions and drawings of the main metric, the loss and ε over the rounds."""
    if not contents.rounds:
        return []
    # matplotlib is slow to import, and `fedsim --help` must not wait for it.
    from fedsim.report.plots import draw_curve

    curves = [_metric_curve(contents, name) for name in _plotted_metrics(contents)]
    curves += [_metric_curve(contents, name) for name in _train_metrics(contents)]
    if contents.facts.is_bounded:
        curves.append(_epsilon_curve(contents))
    drawings = [(curve.label, draw_curve(curve)) for curve in curves]
    return [(label, drawing) for label, drawing in drawings if drawing is not None]


def _plotted_metrics(contents: RunContents) -> list[str]:
    names = list(contents.metrics)
    loss = ["test_loss"] if "test_loss" in names[1:] else []
    return names[:1] + loss + list(contents.client_metrics)[:1]


def _train_metrics(contents: RunContents) -> list[str]:
    """Return the metrics of clients that a secure sum aggregated."""
    return [name for name in TRAIN_METRICS if any(name in row for row in contents.rounds)]


def _metric_curve(contents: RunContents, name: str) -> "Curve":
    from fedsim.report.plots import Curve

    kind = "loss" if name.endswith("loss") else "metric"
    whose, figure = "Test", kind
    if name in TRAIN_METRICS:
        whose, figure = "Train", f"train-{kind}"
    elif name.startswith("clients_"):
        whose, figure = "Clients' held-out", "held-out"
    return Curve(
        name=figure,
        label=f"{whose} {overview.metric_name(name)}",
        rounds=[row["round"] for row in contents.rounds],
        values=[row.get(name) for row in contents.rounds],
        text=lambda value: metric_text(name, value),
        percent=name.endswith("accuracy"),
    )


def _epsilon_curve(contents: RunContents) -> "Curve":
    from fedsim.report.plots import Curve, common_target

    return Curve(
        name="epsilon",
        label=_epsilon_label(contents.facts),
        rounds=[row["round"] for row in contents.rounds],
        values=[row["epsilon_max"] for row in contents.rounds],
        text=epsilon_text,
        target=common_target(_spends(contents)),
        from_zero=True,
    )


def _epsilon_label(facts: Facts) -> str:
    if is_plain(facts):
        return "Largest ε of any client"
    return f"Largest ε of any client, against {OBSERVER_NAMES[facts.trust.observers[0]]}"


def _spend_plot(contents: RunContents) -> "Markup | None":
    facts = contents.facts
    if not facts.is_private or not facts.has_charges or facts.objections:
        return None
    from fedsim.report.plots import draw_spend

    return draw_spend(_spends(contents))


def _spend_caption(contents: RunContents) -> str:
    targets = {spend.get("target_epsilon") for spend in contents.clients}
    facts, what = contents.facts, "ε of each client"
    if not is_plain(facts):
        what += f", against {OBSERVER_NAMES[facts.trust.observers[0]]}"
    if len(targets) > 1 and len(contents.clients) <= MAX_BARS:
        return f"{what}; a vertical mark is its own target"
    return what


def _spends(contents: RunContents) -> "list[Spend]":
    from fedsim.report.plots import Spend

    return [
        Spend(spend["client"], spend["epsilon"], spend.get("target_epsilon"))
        for spend in contents.clients
    ]
