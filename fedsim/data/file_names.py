"""The files that `data:` names, none of which is opened, and messages about names in a file."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from fedsim.core.errors import InputError
from fedsim.core.limits import MAX_MATCHED_FILES
from fedsim.data.settings import DataSettings, FileDataset, FilesPartition

_MAX_NAMES = 1000  # compared with an unknown one
_MAX_CHARS = 100


def unknown_name(path: Path, kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the closest known name or all of them.

    Args:
        path: the file.
        kind: the noun for the named thing, such as column.
        name: the unknown name.
        known: the names in the file.
    """
    names = list(known)
    close = closest_name(name, names)
    hint = f"did you mean {close!r}?" if close is not None else f"known: {quoted(names[:10])}"
    return f"{path}: no {kind} named {name[:_MAX_CHARS]!r}; {hint}"


def quoted(names: Iterable[str]) -> str:
    """Return sorted names in quotes, with commas between; long ones are cut."""
    return ", ".join(repr(name[:_MAX_CHARS]) for name in sorted(names))


def closest_name(name: str, known: list[str]) -> str | None:
    """Return the known name that an unknown one resembles most, or None.

    Args:
        name: the unknown name.
        known: the known ones.
    """
    close = get_close_matches(name[:_MAX_CHARS], known[:_MAX_NAMES], n=1)
    return close[0] if close else None


class TooManyFilesError(InputError):
    """A pattern that leads through too many directories to be read."""


def matching_files(pattern: str, base: Path) -> dict[str, Path]:
    """Return the files of a pattern by client name, sorted: their stems, or paths if stems repeat.

    Args:
        pattern: of shells, such as data/*.csv or data/*/train.csv.
        base: the directory in which relative paths start.

    Raises:
        TooManyFilesError: the directories on the way hold more than `MAX_MATCHED_FILES` names.
    """
    paths = [] if "\0" in pattern else _expanded(base / os.path.expanduser(pattern), pattern)
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        top = os.path.commonpath([path.parent for path in paths])
        names = [path.with_suffix("").relative_to(top).as_posix() for path in paths]
    return dict(sorted(zip(names, paths, strict=True)))


def _expanded(path: Path, pattern: str) -> list[Path]:
    """Return the files that a path with wildcards matches, as `glob.glob` does; each once."""
    first, *parts = [*path.parts, *(["*"] if path.name == "**" else [])]
    waiting, seen, found, names = [(first, tuple(parts))], set(), list[str](), 0
    while waiting:
        if (state := waiting.pop()) in seen:
            continue
        seen.add(state)
        place, parts = state
        if not parts:
            found.append(place)
            continue
        part, rest = parts[0], parts[1:]
        if part != "**" and not has_magic(part):
            waiting.append((os.path.join(place, part), rest))
            continue
        entries = [one for one in _entries(place) if one.name[0] != "." or part[0] == "."]
        names += len(entries)
        if names > MAX_MATCHED_FILES:
            raise TooManyFilesError(
                f"{pattern!r} leads through directories of more than {MAX_MATCHED_FILES:,} names; "
                "name the directory of the files, as in data/**/*.csv"
            )
        if part == "**":
            waiting.append((place, rest))
            waiting += [(one.path, parts) for one in entries if _is_directory(one)]
        else:
            waiting += [(one.path, rest) for one in entries if fnmatchcase(one.name, part)]
    return [Path(one) for one in found if os.path.isfile(one)]


def _entries(directory: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # not there, no directory, or not readable: nothing matches
        return []


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def data_files(settings: DataSettings, base: Path) -> list[Path]:
    """Return the files that a run reads its examples from.

    Args:
        settings: `data:` of the experiment.
        base: the directory in which relative paths start.
    """
    dataset, division = settings.dataset, settings.partition
    if not isinstance(dataset, FileDataset):
        return []
    named = [base / Path(one).expanduser() for one in (dataset.path, dataset.test) if one]
    if isinstance(division, FilesPartition):
        named += matching_files(division.pattern, base).values()
    return named
