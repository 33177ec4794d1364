"""Reading of a dataset from one or more tables, by the column settings of the experiment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import raised_as
from fedsim.core.limits import MAX_REPORTED
from fedsim.data.examples import DataError, Dataset, to_dataset
from fedsim.data.file_names import unknown_name
from fedsim.data.settings import FILE_GROUP, FileDataset
from fedsim.data.tables.column import CellError, Cells, Column, texts_of
from fedsim.data.tables.draft import ColumnDraft, draft_column, draft_target, redraft
from fedsim.data.tables.summary import has_decimal_commas, summarise
from fedsim.data.tables.table import CsvTable, ParquetTable, Table, TableBlock


@dataclass(frozen=True, eq=False)
class TablePart:
    """The n rows of one table, as features, texts and targets.

    Attributes:
        features: float32 (n, k), or float64 (n, k) for tokens.
        texts: n cells of each column that is kept as text, by column name.
        targets: n cells of the target; None if the table has no such column.
        where: function that returns the file and line (or row) for a row index, for messages.
        mistakes: the first mistake of each column that has one, by column name; with a mistake, the
            features cannot be used.
    """

    features: NDArray[Any]
    texts: Mapping[str, Sequence[str]]
    targets: Cells | None
    where: Callable[[int], str]
    mistakes: Mapping[str, str]


def open_table(path: Path, settings: FileDataset) -> Table:
    """Return the table in a file; only the header of a .csv file is read.

    Args:
        path: the file.
        settings: the setting `data.dataset`.

    Raises:
        DataError: the file cannot be read or has no usable header.
    """
    if path.suffix.lower() == ".parquet":
        return ParquetTable.open(path)
    return CsvTable.open(path, wanted=settings.target, encoding=settings.encoding)


def feature_columns(table: Table, settings: FileDataset, group: str | None) -> tuple[str, ...]:
    """Return the names of the columns that are features, in the order of the table.

    Args:
        table: the first table of the training data.
        settings: the setting `data.dataset`.
        group: the column that divides the rows among clients; None if no column does.

    Raises:
        DataError: the table lacks a column that the settings name, or no feature is left.
    """
    names, path = table.names, table.path
    for wanted in (settings.target, group):
        if wanted is not None and wanted not in names:
            raise DataError(unknown_name(path, "column", wanted, names))
    dropped = {name for name, setting in settings.columns.items() if setting == "drop"}
    features = tuple(name for name in names if name not in {settings.target, group, *dropped})
    if not features:
        others = f"no column beside the target {settings.target!r}"
        raise DataError(
            f"{path}: {others}{' that is a feature' if len(names) > 1 else ''}; add a feature"
        )
    return features


def read_part(
    table: Table,
    settings: FileDataset,
    features: Sequence[str],
    *,
    texts: Sequence[str] = (),
    tokens: bool = False,
) -> TablePart:
    """Return the rows of a table as a `TablePart`, whose `mistakes` name the wrong cells.

    Args:
        table: the table.
        settings: the setting `data.dataset`.
        features: names of the columns that become features, in this order.
        texts: names of further columns to keep as text.
        tokens: whether features are tokens, which stay exact.

    Raises:
        DataError: a column is missing, or the file cannot be read.
    """
    for name in (*features, *texts):
        if name not in table.names:
            raise DataError(unknown_name(table.path, "column", name, table.names))
    columns = [column_of(name, settings) for name in features]
    target = [settings.target] if settings.target in table.names else []
    wanted = [*dict.fromkeys([*features, *texts, *target])]
    kind = np.float64 if tokens else np.float32
    rows, places = [np.empty((0, sum(len(c.feature_names) for c in columns)), kind)], list[int]()
    others: dict[str, list[Cells]] = {name: [] for name in (*texts, *target)}
    mistakes = dict[str, str]()
    for block in table.blocks(wanted):
        rows.append(_features(table, block, columns, mistakes).astype(kind))
        places.extend(block.places)
        for name, parts in others.items():
            parts.append(block.cells[name])
    return TablePart(
        features=np.concatenate(rows),
        texts={name: [c for cells in others[name] for c in texts_of(cells)] for name in texts},
        targets=_joined(others[settings.target]) if target else None,
        where=lambda row: table.where(places[row]),
        mistakes=mistakes,
    )


def column_of(name: str, settings: FileDataset) -> Column:
    """Return a table column with the settings by which cells of the column become features.

    Args:
        name: name of the column.
        settings: the setting `data.dataset`.
    """
    return Column(
        name,
        settings.constants_of(name),
        is_listed=name in settings.columns,
        decimal=settings.decimal,
        is_target=name == settings.target,
    )


def read_tables(
    paths: Mapping[str, Path],
    settings: FileDataset,
    *,
    test: Path | None = None,
    group: str | None = None,
    tokens: bool = False,
) -> Dataset:
    """Return the dataset in one table, or in several tables with the same columns.

    Args:
        paths: the files with the training examples by their public names, in order.
        settings: the setting `data.dataset`.
        test: the file of the public test set; None if there is none.
        group: the column that divides the rows among clients and is not a feature; None if no
            column does.
        tokens: whether features are tokens.

    Raises:
        DataError: a file cannot be used; the message names file, row and column, with a line for
            each column that has a mistake.
    """
    tables = [open_table(path, settings) for path in paths.values()]
    test_tables = [] if test is None else [open_table(test, settings)]
    features = feature_columns(tables[0], settings, group)
    every = (*tables, *test_tables)
    for table in every:
        _check_same_columns(table, tables[0], settings, group)
    present = list(dict.fromkeys(name for table in every for name in table.names))
    for listed in settings.columns:
        if listed not in present:
            problem = unknown_name(tables[0].path, "column", listed, present)
            raise DataError(f"data.dataset.columns: {problem}")
    texts = () if group is None else (group,)
    parts = [read_part(table, settings, features, texts=texts, tokens=tokens) for table in tables]
    tests = [read_part(table, settings, features, tokens=tokens) for table in test_tables]
    for table, part in zip(every, [*parts, *tests], strict=True):
        if not len(part.features):
            raise DataError(f"{table.path}: the table has no rows; add the examples")
    drafted = () if tokens else every
    y, names = _checked_targets([*parts, *tests], drafted, settings, group)
    files = [[name] * len(part.features) for name, part in zip(paths, parts, strict=True)]
    groups = {FILE_GROUP: tuple(name for names in files for name in names)}
    if group is not None:
        groups[group] = tuple(cell for part in parts for cell in part.texts[group])
    x = np.concatenate([part.features for part in parts])
    of_test = (tests[0].features, y[len(x) :]) if tests else ()
    with raised_as(DataError, f"{tables[0].path}: "):
        data = to_dataset(x, y[: len(x)], *of_test, tokens=tokens)
    return data._replace(class_names=names or data.class_names, groups=groups, columns=features)


def _checked_targets(
    parts: Sequence[TablePart], tables: Sequence[Table], settings: FileDataset, group: str | None
) -> tuple[NDArray[Any] | list[str], tuple[str, ...] | None]:
    """Return `targets_of` the parts, or raise one error with the mistakes of all columns.

    From `tables` settings are drafted for the message; none for tokens, which have no settings.
    """
    mistakes = dict[str, str]()
    for part in parts:
        mistakes = {**part.mistakes, **mistakes}
        if group is not None and "" in part.texts.get(group, ()):
            place = part.where(list(part.texts[group]).index(""))
            mistakes.setdefault(
                group,
                f"{place}: column {group!r}: the cell is empty, and names the client of the row; "
                "fix the cell or remove the row",
            )
    try:
        targets = targets_of(parts, settings)
    except DataError as error:
        mistakes[settings.target] = str(error)
        raise DataError(_with_drafts(mistakes, tables, settings, group)) from error
    if mistakes:
        raise DataError(_with_drafts(mistakes, tables, settings, group))
    return targets


_DRAFTED = (
    "lines to paste below data.dataset.columns; their constants come from the rows, which no ε "
    "covers: put public ones, or set data.dataset.constants: from_rows"
)


def _with_drafts(
    mistakes: Mapping[str, str],
    tables: Sequence[Table],
    settings: FileDataset,
    group: str | None,
) -> str:
    """Return the mistakes of all columns, a line each, and lines of settings that avoid them."""
    wrong = [name for name in mistakes if name != group]
    lines = [*mistakes.values()][:MAX_REPORTED]
    if len(mistakes) > len(lines):
        lines.append(f"and {len(mistakes) - len(lines)} more columns")
    summaries = summarise(tables, wrong, decimal=settings.decimal)
    if not tables or (settings.decimal == "." and has_decimal_commas(summaries)):
        return "\n".join(lines)  # with the other mark, most columns need no settings
    drafts = list[ColumnDraft]()
    for name, summary in summaries.items():
        listed = settings.constants_of(name)
        if name != settings.target:
            drafts.append(redraft(draft_column(name, summary), listed))
        elif not (summary.gaps or isinstance(listed.classes, dict)):
            drafts.append(redraft(draft_target(name, summary), listed))
    if drafts:
        lines += [_DRAFTED, *(f"  {draft.line}  {draft.comment}" for draft in drafts)]
    return "\n".join(lines)


def targets_of(
    parts: Sequence[TablePart], settings: FileDataset
) -> tuple[NDArray[Any] | list[str], tuple[str, ...] | None]:
    """Return the targets (n,) of all rows, and the class names if the experiment lists them.

    Args:
        parts: the rows of each table; all parts have targets.
        settings: the setting `data.dataset`.

    Raises:
        DataError: a target cannot be used.
    """
    ends = np.cumsum([len(part.features) for part in parts])

    def where(row: int) -> str:
        index = int(np.searchsorted(ends, row, side="right"))
        return parts[index].where(row - (int(ends[index - 1]) if index else 0))

    cells = [part.targets for part in parts if part.targets is not None]
    if len({isinstance(part, np.ndarray) for part in cells}) > 1:
        raise DataError(
            f"data.dataset.target: {settings.target!r} is text in one file and numbers in another; "
            "write the files in one format"
        )
    column = column_of(settings.target, settings)
    try:
        return column.targets(_joined(cells)), column.settings.class_names
    except CellError as error:
        raise DataError(f"{where(error.row)}: column {column.name!r}: {error}") from error


def _check_same_columns(
    table: Table, first: Table, settings: FileDataset, group: str | None
) -> None:
    """Check that a table has the first table's columns, except the group and dropped columns."""
    ignored = {group, *(name for name, setting in settings.columns.items() if setting == "drop")}
    for name in first.names:
        if name not in table.names and name not in ignored:
            problem = unknown_name(table.path, "column", name, table.names)
            raise DataError(f"{problem} ({first.path} has it)")
    for name in table.names:
        if name not in first.names and name not in ignored:
            raise DataError(
                f"{table.path}: column {name!r} is not in {first.path}; add it there, or set "
                f"data.dataset.columns: {{{name}: drop}}"
            )


def _features(
    table: Table, block: TableBlock, columns: Sequence[Column], mistakes: dict[str, str]
) -> NDArray[np.float64]:
    """Return the features of a block (n, k), NaN where a cell is wrong; add to the mistakes."""
    features = []
    for column in columns:
        try:
            features.append(column.features(column.numbers(block.cells[column.name])))
        except CellError as error:
            place = table.where(block.places[error.row])
            mistakes.setdefault(column.name, f"{place}: column {column.name!r}: {error}")
            features.append(np.full((len(block.places), len(column.feature_names)), np.nan))
    return np.concatenate(features, axis=1)


def _joined(blocks: Sequence[Cells]) -> Cells:
    if blocks and all(isinstance(part, np.ndarray) for part in blocks):
        return np.concatenate([np.asarray(part) for part in blocks])
    return [cell for part in blocks for cell in part]
