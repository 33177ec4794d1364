"""Drafting of an experiment from the rows of a table, for `fedsim init --data`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, log10
from pathlib import Path
from string import Template

from fedsim.core.formatting import count_text, printable
from fedsim.data.file_names import TABLE_SUFFIXES, unknown_name
from fedsim.data.settings import FileDataset
from fedsim.data.tables.dataset import open_table
from fedsim.data.tables.draft import ColumnDraft, draft_column, draft_target, flow_text, round_up
from fedsim.data.tables.settings import Cell, ColumnSettings, as_text
from fedsim.data.tables.summary import ColumnSummary, has_decimal_commas, summarise
from fedsim.data.tables.table import CsvTable, Table
from fedsim.starter import StarterError, check_directory, experiment_name, starter_text, write_files

TARGET_NAMES = ("target", "label", "class", "outcome", "diagnosis", "y", "num")
"""Names of a column that is the target where none is given, in this order."""

_CLIENT_NAME = re.compile(
    r"(?:hospital|clinic|site|cent(?:er|re)|institution|bank|branch|school|shop|store|station|"
    r"region|country|state|city|town|client|user|device|source|dataset)(?:[ _-]?(?:id|name|no))?",
    re.IGNORECASE,
)
_MAX_CLIENTS = 50  # most values of a column that is taken for clients by its name
_MIN_ROWS = 20  # least rows of each such client
_DRAWN_CLIENTS = 5
_MANY_ROWS = 5_000  # from here on, more rounds are worth their noise
_COLUMN_INDENT, _COMMENT_COLUMN = 6, 62


@dataclass(frozen=True)
class TableExperiment:
    """An experiment that was drafted from a table.

    Attributes:
        path: the experiment file.
        rows: number of rows of the table.
        target: name of the column to predict.
        target_reason: why this column was chosen as the target.
        clients: name of the column that names each row's client; None if rows are dealt at random.
        clients_reason: why the rows are divided among clients in this way.
        columns: the drafted settings of all columns except `clients`, the target first.
    """

    path: Path
    rows: int
    target: str
    target_reason: str
    clients: str | None
    clients_reason: str
    columns: tuple[ColumnDraft, ...]


def write_table_experiment(
    directory: Path, data: Path, *, target: str | None = None, clients: str | None = None
) -> TableExperiment:
    """Write `experiment.yaml`, drafted from a table, into a new or empty directory.

    Args:
        directory: the directory.
        data: a .csv or .parquet file.
        target: name of the column to predict. None takes the first name in `TARGET_NAMES` that a
            suitable column has, or else the last column if it has few different values.
        clients: name of the column that names the client of each row. None takes a column with a
            name such as hospital, and with 2 to 50 values that occur in at least 20 rows each. If
            there is none, the rows are dealt at random among 5 clients.

    Raises:
        StarterError: the directory is not empty, or the table has no such columns or no features.
        DataError: the table cannot be read.
    """
    check_directory(directory)
    table, form = _open(data)
    summaries = summarise([table], table.names)
    if isinstance(table, CsvTable) and table.delimiter != "," and has_decimal_commas(summaries):
        form["decimal"] = ","
        summaries = summarise([table], table.names, decimal=",")
    if not next(iter(summaries.values())).rows:
        raise StarterError(f"{data}: the table has no rows; add the examples")
    for name in (target, clients):
        if name is not None and name not in summaries:
            raise StarterError(unknown_name(data, "column", name, table.names))
    target, target_reason = _target(data, summaries, target, clients)
    clients, clients_reason = _clients(data, summaries, clients, target)
    drafts = tuple(
        _one_class_a_word(
            draft_target(name, summary) if name == target else draft_column(name, summary)
        )
        for name, summary in summaries.items()
        if name != clients
    )
    if all(draft.settings == "drop" for draft in drafts if draft.name != target):
        raise StarterError(f"{data}: no column beside {target!r} can be a feature; add one")
    first = sorted(drafts, key=lambda draft: draft.name != target)
    draft = TableExperiment(
        path=directory / "experiment.yaml",
        rows=summaries[target].rows,
        target=target,
        target_reason=target_reason,
        clients=clients,
        clients_reason=clients_reason,
        columns=tuple(first),
    )
    write_files(directory, {draft.path.name: _text(draft, data, form, summaries[target])})
    return draft


def _one_class_a_word(draft: ColumnDraft) -> ColumnDraft:
    """Return a draft in which spellings such as yes, Yes and YES are one class."""
    settings = draft.settings
    if not isinstance(settings, ColumnSettings) or not isinstance(settings.classes, list):
        return draft
    words: dict[str, list[Cell]] = {}
    for cell in settings.classes:
        words.setdefault(as_text(cell).casefold(), []).append(cell)
    if not 2 <= len(words) < len(settings.classes):
        return draft
    grouped = {as_text(spellings[0]): spellings for spellings in words.values()}
    fill = next((name for name, cells in grouped.items() if settings.fill in cells), settings.fill)
    settings = settings.model_copy(update={"classes": grouped, "fill": fill})
    return replace(draft, settings=settings, reason=f"{draft.reason}, whatever their case")


def _open(data: Path) -> tuple[Table, dict[str, str]]:
    """Return a table, and the settings that tell how its file is to be read."""
    if data.suffix.lower() not in TABLE_SUFFIXES:
        raise StarterError(f"--data: {data} must be a .csv or .parquet file")
    if not data.is_file():
        raise StarterError(f"--data: no such file: {data}")
    form = dict[str, str]()
    if data.suffix.lower() == ".csv" and (encoding := _encoding(data)) != "utf-8":
        form["encoding"] = encoding
    return open_table(data, FileDataset.model_validate({"target": "", **form})), form


def _encoding(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            return "utf-16"
    try:
        with path.open(encoding="utf-8") as lines:
            for _ in lines:
                pass
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _target(
    data: Path, summaries: Mapping[str, ColumnSummary], given: str | None, clients: str | None
) -> tuple[str, str]:
    """Return the target's name, and why it is that column."""
    if given is not None:
        problem = _unfit_target(given, summaries[given])
        if problem is not None:
            fix = "remove these rows, or name another" if summaries[given].gaps else "name another"
            raise StarterError(f"{data}: --target: column {given!r} {problem}; {fix}")
        return given, "as given"
    fit = {
        name: draft_target(name, summary)
        for name, summary in summaries.items()
        if name != clients and _unfit_target(name, summary) is None
    }
    by_name = {name.lower(): name for name in fit}
    for name in TARGET_NAMES:
        if name in by_name:
            return by_name[name], "by its name"
    last = list(summaries)[-1]
    if last in fit and fit[last].settings is not None:
        return last, "the last column, with few values"
    candidates = [name for name, draft in fit.items() if draft.settings is not None]
    problem = _unfit_target(last, summaries[last]) or "has many different values"
    raise StarterError(
        f"{data}: no column named {', '.join(TARGET_NAMES)} can be the target, and the last one, "
        f"{last!r}, {problem}; name the column to predict: --target COLUMN (columns with few "
        f"values: {', '.join(candidates[:10]) or 'none'})"
    )


def _unfit_target(name: str, summary: ColumnSummary) -> str | None:
    """Return why a column cannot be the target; None if it can."""
    if summary.gaps:
        return f"has {count_text(summary.gaps, 'empty cell')}, and a target has none"
    if summary.is_complete and len(summary.cells) < 2:
        return "has the same value in every row"
    if draft_target(name, summary).settings is None and summary.texts:
        return "has text with many different values"
    return None


def _clients(
    data: Path, summaries: Mapping[str, ColumnSummary], given: str | None, target: str
) -> tuple[str | None, str]:
    """Return the column that names the clients, or None, and why."""
    if given is None:
        natural = [
            name
            for name, summary in summaries.items()
            if name != target and _CLIENT_NAME.fullmatch(name) and _are_clients(summary)
        ]
        if natural:
            return natural[0], "by its name"
        return None, f"{_DRAWN_CLIENTS} clients with rows at random: no column looks like clients"
    summary, problem = summaries[given], None
    if given == target:
        problem = "is the target, and a client would hold one class"
    elif summary.gaps:
        problem = f"has {count_text(summary.gaps, 'empty cell')}, and names the client of each row"
    elif summary.is_complete and len(summary.cells) < 2:
        problem = "has the same value in every row"
    if problem is not None:
        raise StarterError(f"{data}: --clients: column {given!r} {problem}; name another")
    return given, "as given"


def _are_clients(summary: ColumnSummary) -> bool:
    counts = summary.texts + summary.numerals
    return (
        summary.is_complete
        and not summary.gaps
        and 2 <= len(counts) <= _MAX_CLIENTS
        and min(counts.values()) >= _MIN_ROWS
    )


def _text(
    draft: TableExperiment, data: Path, form: Mapping[str, str], target: ColumnSummary
) -> str:
    """Return the text of the experiment file."""
    is_large = draft.rows >= _MANY_ROWS
    is_regression = draft.columns[0].settings is None
    base = draft.path.parent.resolve()
    delta = 10.0 ** floor(-log10(10 * draft.rows))
    partition = (
        f"{{scheme: iid, num_clients: {_DRAWN_CLIENTS}}}   # {draft.clients_reason}"
        if draft.clients is None
        else f"{{scheme: column, column: {flow_text(draft.clients)}}}   # a client for each value"
    )
    values: dict[str, object] = {
        "file": printable(data.name),  # a line break would end the comment
        "name": experiment_name(draft.path.parent),
        "path": flow_text(Path(os.path.relpath(data.resolve(), base)).as_posix()),
        "target": _beside(flow_text(draft.target), draft.target_reason),
        "form": "".join(f"    {key}: {flow_text(value)}\n" for key, value in form.items()),
        "columns": "\n".join(_column_lines(draft)),
        "partition": partition,
        "model": "  args: {bias: false, init: zeros}",
        "rounds": 100 if is_large else 30,
        "lr": 16.0 if is_large else 8.0,
        "delta": f"{delta:.1e}".replace("e-0", "e-"),
        "delta_comment": f"                # below 1 / {draft.rows:,} rows, so for any division",
        "norm": "0.5           # bound on the gradient of one example",
    }
    if is_regression:
        bound = round_up(max(abs(target.values).max() / 2, 1e-30))
        values |= {
            "model": "  args: {init: zeros}\n  loss: mse                    # a regression",
            "lr": 0.3,
            "norm": f"{bound:g}           # half of the largest target, read from the rows",
        }
    return Template(starter_text("table.yaml")).substitute(values)


def _beside(text: str, comment: str) -> str:
    return f"{text:<18} # {comment}"


def _column_lines(draft: TableExperiment) -> list[str]:
    indent, lines = " " * _COLUMN_INDENT, list[str]()
    for column in draft.columns:
        if column.settings is not None:
            lines.append(f"{indent + column.line:<{_COMMENT_COLUMN}}  {column.comment}")
        if column.name == draft.target and isinstance(column.settings, ColumnSettings):
            lines += [f"{indent}# {line}" for line in _groupings(column)]
    return lines


def _groupings(target: ColumnDraft) -> list[str]:
    """Return how classes of the target can be put together, as lines of comment."""
    classes = target.settings.classes if isinstance(target.settings, ColumnSettings) else None
    if not isinstance(classes, list) or len(classes) < 3:
        return []
    groups = {"first": classes[:1], "others": classes[1:]}
    lines = [f"two classes: {flow_text({target.name: {'classes': groups}})[1:-1]}"]
    if all(isinstance(cell, int) for cell in classes):
        lines.append(f"or by a cut: {flow_text({target.name: {'above': classes[0]}})[1:-1]}")
    return lines
