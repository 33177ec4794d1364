"""Rules between the keys of an experiment file, a module for each part, and what rules share.

A rule is a function `check_...` that yields (path, message) for each mistake. It runs if all
sections that it reads are valid (`Sections`), even if other sections have mistakes.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsim.clients.client_settings import FaultSettings
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data.file_names import DATA_SUFFIXES
from fedsim.data.settings import DataSettings
from fedsim.experiment.errors import KeyPath, any_of, did_you_mean, value_text
from fedsim.experiment.messages import Mistakes, PathMessage, validation_messages
from fedsim.experiment.schema import Experiment
from fedsim.experiment.shapes import Model
from fedsim.models.settings import ModelSettings
from fedsim.pate.settings import PateSettings
from fedsim.personalization.settings import PersonalizationSettings
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import EvaluationSettings, FederationSettings
from fedsim.simulation.settings import RuntimeSettings

RoundSizes = tuple[int, int]
"""(fewest, most) clients of a non-empty round; expected numbers under Poisson sampling."""


@dataclass(frozen=True)
class Sections:
    """The valid sections of an experiment; None for one that is absent, null or has mistakes."""

    base: Path  # to which relative paths refer
    data: DataSettings | None = None
    model: ModelSettings | None = None
    federation: FederationSettings | None = None
    local: LocalSettings | None = None
    privacy: PrivacySettings | None = None
    secure_aggregation: SecureAggregationSettings | None = None
    evaluation: EvaluationSettings | None = None
    personalization: PersonalizationSettings | None = None
    task: str = "federated"
    pate: PateSettings | None = None
    faults: Sequence[FaultSettings] = ()
    runtime: RuntimeSettings | None = None
    mistaken: Collection[str] = ()  # names of the sections with mistakes
    unit: object = None  # `privacy.unit` in the file, even if `privacy` has mistakes

    @classmethod
    def of(cls, valid: Mapping[str, Any], base: Path, *, unit: object = None) -> "Sections":
        """Return the sections of an experiment, from its valid sections by name."""
        known = {field.name: valid[field.name] for field in fields(cls) if field.name in valid}
        return cls(base, **known, mistaken=Experiment.model_fields.keys() - valid.keys(), unit=unit)

    @property
    def num_clients(self) -> int | None:
        """Number of clients; None if the file does not give it."""
        return None if self.data is None else self.data.partition.num_clients

    @cached_property
    def round_sizes(self) -> RoundSizes | None:
        """Smallest and largest number of clients in a round that has clients; None if unknown."""
        if self.federation is None:
            return None
        partial = self.federation.partial_work
        drops = partial is not None and partial.on_partial == "drop"
        if self.federation.participation.scheme in ("uniform", "poisson") and not drops:
            drawn = self.federation.clients_per_round or self.num_clients
            return None if drawn is None else (drawn, drawn)
        if self.num_clients is None:
            return None
        # Imported here: numpy is slow to import, and most files do not need it.
        from fedsim.server.participation.participation import Participation

        return Participation.of(self.federation, num_clients=self.num_clients, seed=0).round_sizes


def example_keys_of_clients(privacy: PrivacySettings) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path of a client or group, key) for each key in it that acts on examples."""
    for name, entry in privacy.clients.items():
        for key in ("max_grad_norm", "sampling_rate"):
            if getattr(entry, key) is not None or key in entry.columns:
                yield ("privacy", "clients", name), key


def mistake(line: str) -> PathMessage:
    """Return (key path, message) of a line `key.path: message`; no key has a dot or a colon."""
    key, _, message = line.partition(": ")
    return tuple(key.split(".")), message


def messages_at(path: KeyPath, message: str | None) -> Mistakes:
    """Yield the pair (key path, message), unless the message is None: there is no mistake."""
    if message is not None:
        yield path, message


def too_many_clients(path: KeyPath, number: int | None, clients: int) -> Mistakes:
    """Yield (key path, message) if a key asks for more clients than there are."""
    if number is not None and number > clients:
        rule = f"must be <= data.partition.num_clients ({value_text(clients)})"
        yield path, f"{rule}, got {value_text(number)}"


def finite_messages(value: object, path: KeyPath) -> Mistakes:
    """Yield (key path, message) for every infinite number and every NaN inside a value."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value_text(value)}"
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from finite_messages(item, (*path, key))


def args_messages(given: dict[str, Any], kind: Model, path: KeyPath) -> Mistakes:
    """Yield (key path, message) for every mistake in the arguments of a built-in component."""
    try:
        kind.model_validate(given)
    except ValidationError as error:
        yield from validation_messages(error, given, kind, path)


def check_name(name: str, kind: str, builtin: Collection[str], base: Path) -> str | None:
    """Return what is wrong with the name of a component or plug-in, or None if it is valid."""
    if name in builtin:
        return None
    if ":" in name:
        return _check_plugin(name, base)
    shown = value_text(name)
    if name.endswith(".py"):
        return f"unknown {kind} {shown}; to use a function of the file write ./file.py:function"
    if kind == "dataset" and name.endswith(DATA_SUFFIXES):
        return f"unknown dataset {shown}; to use a file write {{path: FILE, target: NAME}}"
    ways = "a plug-in is package.module:function or ./file.py:function"
    fix = did_you_mean(name, builtin) or f"; built in: {any_of(sorted(builtin))}; {ways}"
    return f"unknown {kind} {shown}{fix}"


def check_file(path: str, base: Path, *suffixes: str) -> str | None:
    """Return what is wrong with the path of a file of some types, or None if it can be used."""
    if suffixes and not path.lower().endswith(suffixes):
        return f"must end in {any_of(suffixes)}, got {value_text(path)}"
    full = _absolute(path, base)
    return None if os.path.isfile(full) else f"no such file: {full!r}"


def check_folder(path: str, base: Path) -> str | None:
    """Return what is wrong with the path of a folder of data files, or None if it can be used."""
    full = _absolute(path, base)
    if os.path.isfile(full):
        return f"must be the folder with the files, got the file {full!r}"
    return None if os.path.isdir(full) else f"no such folder: {full!r}"


def _check_plugin(name: str, base: Path) -> str | None:
    """Return the mistake in a plug-in reference that is visible without importing it, or None."""
    where, _, function = name.rpartition(":")
    shown = value_text(name)
    form = f"must be package.module:function or ./file.py:function, got {shown}"
    if not _is_dotted_name(function):
        return form
    if where.endswith(".py"):
        return check_file(where, base)
    if where.startswith((".", "/", "~")):
        return f"a plug-in file must end in '.py', got {shown}"
    return None if _is_dotted_name(where) else form


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _absolute(path: str, base: Path) -> str:
    # os.path.isfile returns False for a path with a NUL or a name that is too long; pathlib raises.
    if "\0" not in path:
        path = os.path.expanduser(path)
    return os.path.abspath(os.path.join(base, path))
