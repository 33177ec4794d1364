"""Privacy settings of clients from csv files that an experiment names."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from fedsim.clients.budget.client_privacy import Table
from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings, is_client
from fedsim.clients.settings import PrivacySettings
from fedsim.data import DataError

_CLIENT = "client"


def read_client_tables(privacy: PrivacySettings, base: Path) -> dict[str, Table]:
    """Return the csv file of each entry of `privacy.clients` that has one, by the entry's name.

    An empty cell means: as everybody.

    Args:
        privacy: the `privacy` section.
        base: where relative paths start.

    Raises:
        DataError: a file cannot be read, lacks a column, or a cell is not a valid setting; the
            message names the file and the line.
    """
    return {
        name: _read(base / Path(entry.csv).expanduser(), entry)
        for name, entry in privacy.clients.items()
        if entry.csv is not None
    }


def _read(path: Path, entry: ClientPrivacySettings) -> Table:
    table: dict[int, OwnPrivacySettings] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or (), entry)
            for row in reader:
                where = f"{path}:{reader.line_num}"
                client = (row[_CLIENT] or "").strip()
                if not is_client(client):
                    raise DataError(f"{where}: client must be a client number, got {client!r}")
                if int(client) in table:
                    raise DataError(f"{where}: client {client} has a line already")
                table[int(client)] = _settings(where, row, entry)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a csv file: {error}") from error
    if not table:
        raise DataError(f"{path}: has no line for any client")
    return table


def _check_columns(path: Path, names: Sequence[str], entry: ClientPrivacySettings) -> None:
    for column in (_CLIENT, *entry.columns.values()):
        if column not in names:
            there = ", ".join(names) or "none"
            raise DataError(f"{path}:1: there is no column {column!r}; the columns are: {there}")


def _settings(
    where: str, row: Mapping[str, str | None], entry: ClientPrivacySettings
) -> OwnPrivacySettings:
    values: dict[str, float] = {}
    for setting, column in entry.columns.items():
        text = (row[column] or "").strip()
        if not text:
            continue
        try:
            values[setting] = float(text)
        except ValueError:
            raise DataError(f"{where}: {column} must be a number, got {text!r}") from None
    try:
        return OwnPrivacySettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        setting = str(first["loc"][0])
        rule = first["msg"].replace("Input should be", "must be")
        column = next(name for key, name in entry.columns.items() if key == setting)
        raise DataError(f"{where}: {column}: {rule}, got {first['input']}") from None
