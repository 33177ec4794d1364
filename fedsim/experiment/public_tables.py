"""Reading of public tables: csv files with the clients' availability or durations.

`federation.participation` names them. A run's `experiment.yaml` contains their content, so
schedules can be replayed without the files, and a changed file cannot alter a resumed run.
"""

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS
from fedsim.experiment.errors import value_text
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules import check_file
from fedsim.experiment.yaml_loader import MAX_DIGITS
from fedsim.server.participation.settings import (
    MAX_AVAILABILITY_CHARACTERS,
    BufferedParticipation,
    DurationTable,
    ParticipationSettings,
    TraceParticipation,
    join_ranges,
    ranges_of,
    ranges_text,
)
from fedsim.server.settings import FederationSettings


class _TableError(ValueError):
    """A table that cannot be used; the message names the line, the value and the rule."""


def read_public_tables(
    federation: FederationSettings, base: Path
) -> tuple[FederationSettings | None, list[PathMessage]]:
    """Return the settings with the content of the csv file that they name in place of its path.

    None if the file has mistakes; and a pair (key path in the experiment file, message) for each.
    """
    settings = federation.participation
    path = named_table(settings)
    if path is None:
        return federation, []
    mistake = check_file(path, base, ".csv")
    try:
        if mistake is None:
            read = _with_content(settings, base / os.path.expanduser(path))
            return federation.model_copy(update={"participation": read}), []
    except _TableError as error:
        mistake = str(error)
    except ValidationError as error:
        mistake = str(error.errors()[0]["msg"])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        mistake = f"cannot be read as a csv file: {error}"
    inner = ("durations",) if isinstance(settings, BufferedParticipation) else ()
    return None, [(("federation", "participation", *inner, "path"), mistake)]


def named_table(settings: ParticipationSettings) -> str | None:
    """Return the path of the csv file that participation settings name, or None."""
    source = getattr(settings, "durations", settings)
    return getattr(source, "path", None)


def _with_content(settings: ParticipationSettings, path: Path) -> ParticipationSettings:
    given = settings.model_dump(exclude={"path"})
    if not isinstance(settings, BufferedParticipation):
        return TraceParticipation(**{**given, "availability": _availability(path)})
    column = given["durations"]["column"]
    table = DurationTable(column=column, values=_durations(path, column))
    return BufferedParticipation(**{**given, "durations": table})


def _availability(path: Path) -> str:
    """Return a trace as lines `clients: rounds`; clients with equal rounds share a line."""
    windows: dict[int, list[range]] = {}
    for line, row in _rows(path, ("client", "round"), ("client", "first", "last")):
        client = _number(path, line, row, "client", 0, MAX_CLIENTS - 1)
        first = _number(path, line, row, "round" if "round" in row else "first", 1, MAX_ROUNDS)
        last = first if "round" in row else _number(path, line, row, "last", first, MAX_ROUNDS)
        windows.setdefault(client, []).append(range(first, last + 1))
    clients_of: dict[str, list[int]] = {}
    for client, window in sorted(windows.items()):
        clients_of.setdefault(ranges_text(join_ranges(window)), []).append(client)
    text = "".join(
        f"{ranges_text(ranges_of(clients))}: {rounds}\n" for rounds, clients in clients_of.items()
    )
    if len(text) > MAX_AVAILABILITY_CHARACTERS:
        raise _TableError(
            f"the trace needs {len(text):,} characters in the experiment of a run, and at most "
            f"{MAX_AVAILABILITY_CHARACTERS:,} fit; use fewer, longer windows, or period"
        )
    return text


def _durations(path: Path, column: str) -> list[float]:
    """Return the duration of each client, in the order of client numbers 0, 1, 2, ..."""
    durations: dict[int, float] = {}
    for line, row in _rows(path, ("client", column)):
        client = _number(path, line, row, "client", 0, MAX_CLIENTS - 1)
        if client in durations:
            raise _TableError(f"line {line}: client {client} has two lines; remove one")
        rule, given = f"line {line}: {column} must be", f"got {row[column]!r}"
        try:
            durations[client] = float(row[column])
        except ValueError:
            raise _TableError(f"{rule} a number, {given}") from None
        if not durations[client] > 0:
            raise _TableError(f"{rule} > 0, {given}")
    if missing := set(range(len(durations))) - durations.keys():
        raise _TableError(f"client {min(missing)} has no line; write one line for each client")
    return [durations[client] for client in range(len(durations))]


def _rows(path: Path, *choices: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield (line number, cells by column) of each row; the columns must be one of `choices`."""
    count = 0
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restval="")
        names = reader.fieldnames or ()
        if not any(set(columns) <= set(names) for columns in choices):
            needed = " or ".join(", ".join(columns) for columns in choices)
            found = ", ".join(names) or "none"
            raise _TableError(f"must have the columns {needed}; the file has {found}")
        for row in reader:
            count += 1
            yield reader.line_num, row
    if not count:
        raise _TableError("no client has a line; write one line for each client")


def _number(
    path: Path, line: int, row: Mapping[str, str], column: str, least: int, most: int
) -> int:
    text = row[column].strip()
    is_whole = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    if not is_whole or not least <= int(text) <= most:
        raise _TableError(
            f"line {line} of {path.name}: {column} must be a whole number from {least} to {most}, "
            f"got {value_text(text)}"
        )
    return int(text)
