"""Records of measured studies, and the page that shows them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.reproductions.rows import Row
from experiments.reproductions.study import Size, Study

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "reproductions.md"
TABLE = "<!-- results: written by python -m experiments.reproductions --write -->"
"""Everything on the page below this line is generated."""

_VERDICTS = {"agrees": "agrees", "differs": "**differs**", "unclear": "*unclear*"}


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

    @property
    def arguments(self) -> str:
        """What follows the module's name in the command: `NAME --size full`."""
        return self.command.split("experiments.reproductions ")[1]


def write_record(record: Record, directory: Path = RESULTS) -> Path:
    """Write a record as NAME-SIZE.json, in place of an older one, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{record.name}-{record.size}.json"
    path.write_text(json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n")
    return path


def read_records(directory: Path = RESULTS) -> list[Record]:
    """Return the records in the directory, by name and size."""
    contents = (json.loads(path.read_text()) for path in sorted(directory.glob("*.json")))
    return [
        Record(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})
        for content in contents
    ]


def render_page(text: str, studies: Mapping[str, Study], records: Iterable[Record]) -> str:
    """Return the page with its generated part made anew.

    Args:
        text: the page as it is.
        studies: all studies by name.
        records: all records; a full-size one is shown in place of a reduced one.
    """
    newest = {
        record.name: record for record in sorted(records, key=lambda item: item.size != "reduced")
    }
    lines = ["| claim | published | ours [95 % interval] | verdict |", "|---|---|---|---|"]
    missing = []
    for name, study in studies.items():
        if name in newest:
            lines += _lines(study, newest[name])
        else:
            missing.append(f"- `{name}`, {study.source}: {_need(study)}")
    parts = [text.split(TABLE)[0] + TABLE, "\n".join(lines)]
    if missing:
        parts += ["Not measured here:", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def _lines(study: Study, record: Record) -> list[str]:
    """Return the lines of a study: its title, and the results that were published."""
    title = f"**{study.title}** ({study.source})"
    lines = [_line(title, "", f"`{record.arguments}`, {record.date}", study.remark)]
    for row in record.rows:
        if row.verdict != "context":
            verdict = f"{_VERDICTS[row.verdict]} ({row.tolerance})"
            lines.append(_line(row.what, row.published, row.measured, verdict))
    return lines


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _need(study: Study) -> str:
    if not study.files:
        return "not measured yet"
    paths = ", ".join(f"`{file.path}`" for file in study.files)
    origins = "; ".join(sorted({file.origin for file in study.files}))
    return f"needs {paths} below `--data` ({origins})"
