"""Records of measured studies, and the page that shows them."""

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.reproductions.rows import Row
from experiments.reproductions.study import Size, Study

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).with_name("README.md")
TABLE = "<!-- results: written by python -m experiments.reproductions --write -->"
"""Everything on the page below this line is generated."""

_VERDICTS = {"agrees": "agrees", "differs": "**differs**", "unclear": "*unclear*", "context": ""}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A measured study.

    Attributes:
        name: the study's module.
        size: `reduced` or `full`.
        date: day of the measurement, such as 2026-11-23.
        version: version of fedsim.
        command: the command that measures it again.
        rows: the rows of the table.
    """

    name: str
    size: Size
    date: str
    version: str
    command: str
    rows: tuple[Row, ...]


def write_record(record: Record, directory: Path = RESULTS) -> Path:
    """Write a record as NAME-SIZE.json, in place of an older one, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{record.name}-{record.size}.json"
    path.write_text(json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n")
    return path


def read_records(directory: Path = RESULTS) -> list[Record]:
    """Return the records in the directory, by name and size."""
    found = []
    for path in sorted(directory.glob("*.json")):
        content = json.loads(path.read_text())
        found.append(Record(**{**content, "rows": tuple(Row(**row) for row in content["rows"])}))
    return found


def render_page(text: str, studies: Mapping[str, Study], records: Iterable[Record]) -> str:
    """Return the page with its generated part made anew.

    Args:
        text: the page as it is.
        studies: all studies by name.
        records: all records; a full-size one is shown in place of a reduced one.
    """
    newest = {one.name: one for one in sorted(records, key=lambda one: one.size != "reduced")}
    sections, last = [], ""
    for name, study in studies.items():
        settings = "Settings as above." if study.settings == last else study.settings
        sections.append(_section(name, study, settings, newest.get(name)))
        last = study.settings
    return text.split(TABLE)[0] + "\n\n".join([TABLE, *sections]) + "\n"


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| result | published | measured | agrees within | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row.what, row.published, row.measured, row.tolerance, _VERDICTS[row.verdict])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _section(name: str, study: Study, settings: str, record: Record | None) -> str:
    parts = [f"## {study.title}", _wrapped(f"{study.source}."), _wrapped(settings)]
    if study.files:
        files = ", ".join(f"`{one.path}`" for one in study.files)
        origins = "; ".join(sorted({one.origin for one in study.files}))
        parts.append(_wrapped(f"Below the directory of `--data` it needs {files} ({origins})."))
    if record is None:
        command, facts = (
            f"python -m experiments.reproductions {name} --size full",
            "Not measured yet.",
        )
        if study.files:
            facts = "Not measured: the files are the user's."
        return "\n\n".join([*parts, f"```\n{command}\n```", facts])
    facts = f"{record.date}, {record.size} size, fedsim {record.version}:"
    return "\n\n".join([*parts, f"```\n{record.command}\n```", facts, table(record.rows)])


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 108, break_on_hyphens=False))
