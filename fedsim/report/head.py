"""The head of the report, for notebooks: figures and guarantee, without the rest of the page."""

from pathlib import Path

from fedsim.report import overview
from fedsim.report.contents import read_contents
from fedsim.report.html import page_templates
from fedsim.report.points import guarantees, warnings
from fedsim.runs.directory import RunDirectory
from fedsim.statement import statement_of


def render_head(path: Path) -> str:
    """Return the figures and the guarantee of a run directory as a fragment of HTML.

    Its styles apply to the fragment alone. All text from files is escaped.

    Raises:
        RunDirectoryError: the run has no result files.
    """
    contents = read_contents(RunDirectory.open(path))
    sentences = statement_of(contents.facts)
    return (
        page_templates()
        .get_template("head.html.jinja")
        .render(
            name=contents.summary["name"],
            status=contents.summary["status"],
            reason=contents.summary["reason"],
            cards=overview.cards(contents),
            guarantees=guarantees(sentences),
            warnings=warnings(sentences),
            report=(path / "report.html").as_posix(),
        )
    )
