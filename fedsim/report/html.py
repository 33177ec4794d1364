"""The report of a run: one HTML file without scripts, readable offline, on paper and on a phone.

It is made from the files of the run directory only, so it can be written again at any time; the
same files give the same bytes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from fedsim.report import client_table, overview
from fedsim.report.contents import RunContents, read_contents
from fedsim.report.figures import epsilon_text, metric_text
from fedsim.report.guarantee import interpretation, limits, warnings
from fedsim.report.recompute import recipe
from fedsim.run_directory import RunDirectory

if TYPE_CHECKING:
    from markupsafe import Markup

    from fedsim.report.plots import Curve, Spend

_MAX_SETTINGS = 30_000


def write_report(directory: RunDirectory) -> None:
    """Write `report.html` from the other files of a run directory.

    Raises:
        RunDirectoryError: the run did not get far enough to have a result.
    """
    directory.write_text("report.html", render(read_contents(directory)))


def render(contents: RunContents) -> str:
    """Return the report as HTML. Everything that comes from the files is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(_context(contents))
    # Messages of failures may hold half characters, of undecodable file names for example.
    return page.encode(errors="replace").decode()


def _context(contents: RunContents) -> dict[str, Any]:
    incidents = overview.incidents(contents)
    epsilon = contents.epsilon  # None without privacy, too
    return {
        "name": contents.summary["name"],
        "status": contents.summary["status"],
        "reason": contents.summary["reason"],
        "cards": overview.cards(contents),
        "private": contents.private,
        "statement": contents.privacy["statement"],
        "interpretation": None if epsilon is None else interpretation(epsilon, contents.delta),
        "limits": () if epsilon is None else limits(contents.privacy["noise"]),
        "warnings": warnings(contents),
        "curves": _curves(contents),
        "spend_plot": _spend_plot(contents),
        "spend_caption": _spend_caption(contents),
        "client_rows": client_table.client_rows(contents.clients) if contents.private else [],
        "num_clients": len(contents.clients),
        "recipe": recipe(contents),
        "incidents": incidents[: overview.MAX_INCIDENTS],
        "num_incidents": len(incidents),
        "settings": contents.experiment[:_MAX_SETTINGS],
        "settings_cut": len(contents.experiment) > _MAX_SETTINGS,
        "environment": overview.environment_rows(contents),
    }


def _curves(contents: RunContents) -> list[tuple[str, "Markup"]]:
    """Return captions and drawings of the main metric, the loss and ε over the rounds."""
    if not contents.rounds:
        return []
    # Here and not above: matplotlib takes a while, and `fedsim --help` must not wait for it.
    from fedsim.report.plots import draw_curve

    curves = [_metric_curve(contents, name) for name in _plotted_metrics(contents)]
    if contents.private:
        curves.append(_epsilon_curve(contents))
    drawings = [(curve.label, draw_curve(curve)) for curve in curves]
    return [(label, drawing) for label, drawing in drawings if drawing is not None]


def _plotted_metrics(contents: RunContents) -> list[str]:
    names = list(contents.metrics)
    return names[:1] + (["test_loss"] if "test_loss" in names[1:] else [])


def _metric_curve(contents: RunContents, name: str) -> "Curve":
    from fedsim.report.plots import Curve

    return Curve(
        name="loss" if name == "test_loss" else "metric",
        label=f"Test {overview.metric_name(name)}",
        rounds=[row["round"] for row in contents.rounds],
        values=[row.get(name) for row in contents.rounds],
        text=lambda value: metric_text(name, value),
        percent=name.endswith("accuracy"),
    )


def _epsilon_curve(contents: RunContents) -> "Curve":
    from fedsim.report.plots import Curve, common_target

    return Curve(
        name="epsilon",
        label="Largest ε of any client",
        rounds=[row["round"] for row in contents.rounds],
        values=[row["epsilon_max"] for row in contents.rounds],
        text=epsilon_text,
        target=common_target(_spends(contents)),
        from_zero=True,
    )


def _spend_plot(contents: RunContents) -> "Markup | None":
    if not any(spend["epsilon"] for spend in contents.clients):
        return None
    from fedsim.report.plots import draw_spend

    return draw_spend(_spends(contents))


def _spend_caption(contents: RunContents) -> str:
    targets = {spend.get("target_epsilon") for spend in contents.clients}
    if len(targets) > 1 and len(contents.clients) <= client_table.MAX_BARS:
        return "ε of each client; a vertical mark is its own target"
    return "ε of each client"


def _spends(contents: RunContents) -> "list[Spend]":
    from fedsim.report.plots import Spend

    return [
        Spend(spend["client"], spend["epsilon"], spend["target_epsilon"])
        for spend in contents.clients
    ]
