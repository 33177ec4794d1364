"""Privacy settings of clients, read from the csv files that an experiment names."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings, is_client
from fedsim.clients.mechanisms.client_privacy import Table
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data import DataError

_CLIENT = "client"


def read_client_tables(privacy: PrivacySettings, base: Path) -> dict[str, Table]:
    """Return the tables of the entries of `privacy.clients` that name a csv file, by entry name.

    An empty cell keeps the value of the `privacy` section.

    Args:
        privacy: the `privacy` section.
        base: the directory in which relative paths start.

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
                position = f"{path}:{reader.line_num}"
                client = (row[_CLIENT] or "").strip()
                if not is_client(client):
                    raise DataError(f"{position}: client must be a client number, got {client!r}")
                if int(client) in table:
                    raise DataError(f"{position}: client {client} has two lines; remove one")
                table[int(client)] = _settings(position, row, entry)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a csv file: {error}") from error
    if not table:
        raise DataError(f"{path}: no client has a line; add one line for each client")
    return table


def _check_columns(path: Path, names: Sequence[str], entry: ClientPrivacySettings) -> None:
    for column in (_CLIENT, *entry.columns.values()):
        if column not in names:
            found = ", ".join(names) or "none"
            raise DataError(f"{path}:1: no column {column!r}; columns of the file: {found}")


def _settings(
    position: str, row: Mapping[str, str | None], entry: ClientPrivacySettings
) -> OwnPrivacySettings:
    values: dict[str, float] = {}
    for setting, column in entry.columns.items():
        text = (row[column] or "").strip()
        if not text:
            continue
        try:
            values[setting] = float(text)
        except ValueError:
            raise DataError(f"{position}: {column} must be a number, got {text!r}") from None
    try:
        return OwnPrivacySettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        setting = str(first["loc"][0])
        rule = first["msg"].replace("Input should be", "must be")
        column = next(name for key, name in entry.columns.items() if key == setting)
        raise DataError(f"{position}: {column}: {rule}, got {first['input']}") from None
