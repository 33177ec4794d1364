"""Kinds of data files, the search for them, and error messages for names not found in a file."""

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from fedsim.core.errors import InputError
from fedsim.core.limits import MAX_MATCHED_FILES
from fedsim.core.names import closest_hint
from fedsim.data.settings import DataSettings, FileDataset, FilesPartition

TABLE_SUFFIXES = (".csv", ".parquet")
DATA_SUFFIXES = (".npz", *TABLE_SUFFIXES)

MAX_NAMES = 1000  # known names that are compared with an unknown one
MAX_CHARS = 100  # of a name in a message


def unknown_name(path: Path, kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name, with the closest known name or all known names.

    Args:
        path: the file.
        kind: noun for the named object, such as column.
        name: the unknown name.
        known: the names in the file.
    """
    names = list(known)
    hint = closest_hint(
        name[:MAX_CHARS], names[:MAX_NAMES], otherwise=f"known: {quoted(names[:10])}"
    )
    return f"{path}: no {kind} named {name[:MAX_CHARS]!r}; {hint}"


def quoted(names: Iterable[str]) -> str:
    """Return names as one text: sorted, in quotes, separated by commas; long names are cut."""
    return ", ".join(repr(name[:MAX_CHARS]) for name in sorted(names))


class TooManyFilesError(InputError):
    """Raised for a file pattern that leads through directories with too many names."""


def matching_files(pattern: str, base: Path) -> dict[str, Path]:
    """Return the files that match a pattern, as a dictionary from name to path, sorted by name.

    A file's name is its file name without suffix. If two files share a name, the names of all files
    are their relative paths without suffix; if two still share one, with suffix.

    Args:
        pattern: shell pattern, such as data/*.csv or data/*/train.csv.
        base: the directory to which relative paths refer.

    Raises:
        TooManyFilesError: the searched directories hold more than `MAX_MATCHED_FILES` names.
    """
    paths = [] if "\0" in pattern else _expanded(base / os.path.expanduser(pattern), pattern)
    top = os.path.commonpath([path.parent for path in paths]) if paths else ""
    places = [path.relative_to(top) for path in paths]
    forms = (
        [path.stem for path in paths],
        [place.with_suffix("").as_posix() for place in places],
        [place.as_posix() for place in places],
    )
    names = next(names for names in forms if len(set(names)) == len(paths))
    return dict(sorted(zip(names, paths, strict=True)))


def _expanded(path: Path, pattern: str) -> list[Path]:
    """Return the files that a path with wildcards matches, each once, like `glob.glob`."""
    first, *parts = [*path.parts, *(["*"] if path.name == "**" else [])]
    waiting, seen, matches, names = [(first, tuple(parts))], set(), list[str](), 0
    while waiting:
        if (state := waiting.pop()) in seen:
            continue
        seen.add(state)
        place, parts = state
        if not parts:
            matches.append(place)
            continue
        part, rest = parts[0], parts[1:]
        if part != "**" and not has_magic(part):
            waiting.append((os.path.join(place, part), rest))
            continue
        entries = [entry for entry in _entries(place) if entry.name[0] != "." or part[0] == "."]
        names += len(entries)
        if names > MAX_MATCHED_FILES:
            raise TooManyFilesError(
                f"{pattern!r} leads through directories of more than {MAX_MATCHED_FILES:,} names; "
                "name the directory of the files, as in data/**/*.csv"
            )
        if part == "**":
            waiting.append((place, rest))
            waiting += [(entry.path, parts) for entry in entries if _is_directory(entry)]
        else:
            waiting += [(entry.path, rest) for entry in entries if fnmatchcase(entry.name, part)]
    return [Path(match) for match in matches if os.path.isfile(match)]


def _entries(directory: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # missing, not a directory, or not readable: nothing matches
        return []


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def data_files(settings: DataSettings, base: Path) -> list[Path]:
    """Return the files with training or test examples that the settings name; may be empty.

    Args:
        settings: the section `data` of the experiment.
        base: the directory to which relative paths refer.
    """
    dataset, division = settings.dataset, settings.partition
    if not isinstance(dataset, FileDataset):
        return []
    named = [base / os.path.expanduser(path) for path in (dataset.path, dataset.test) if path]
    if isinstance(division, FilesPartition):
        named += matching_files(division.pattern, base).values()
    return named
