"""A tree of YAML values, each with its location in the file or on the command line.

The location of a mistake is looked up in the tree by its key path. Nodes are immutable and may be
shared, as YAML aliases are.
"""

import numbers
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedsim.core.python_objects import (
    PLACES,
    PythonObject,
    file_instead,
    object_of,
    refusal,
    takes_object,
)
from fedsim.experiment.errors import ExperimentError, KeyPath, Problem, value_text

MAX_DEPTH = 64
MAX_SIZE = 100_000
MAX_DIGITS = 1000  # Python prints at most 4,300 digits

YamlScalar = None | bool | int | float | str


@dataclass(frozen=True)
class Location:
    """A place in a file, with line and column counted from 1, or on the command line."""

    source: str
    line: int | None = None
    column: int | None = None

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem at this location, for a key path and a message."""
        return Problem(self.source, self.line, self.column, path, message)

    def error(self, problems: list[Problem], message: str, path: KeyPath = ()) -> ExperimentError:
        """Return the error that ends the reading, with all problems so far and one at this place.

        Args:
            problems: the problems so far.
            message: what is wrong.
            path: the keys from the top level to the mistake.
        """
        return ExperimentError([*problems, self.problem(path, message)])


@dataclass(frozen=True)
class Node:
    """A value of a YAML file: a scalar, a list or a mapping.

    Attributes:
        value: the scalar, or the children of a list or mapping.
        location: the place where the value starts.
        broken: whether a problem was reported for this node; problems that follow from it are not
            reported.
        size: number of nodes in the subtree, where each use of an alias counts.
        empty: whether the value has no text in the file, which YAML reads as null.
    """

    value: "YamlScalar | list[Node] | dict[str, Entry]"
    location: Location
    broken: bool = False
    size: int = 1
    empty: bool = False

    @property
    def entries(self) -> "dict[str, Entry]":
        """The children of a mapping by key; empty if the value is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}


@dataclass(frozen=True)
class Entry:
    """A value in a mapping, and the location of its key."""

    key: Location
    node: Node


def to_python(node: Node) -> object:
    """Return a node's value as new Python scalars, lists and dictionaries."""
    if isinstance(node.value, dict):
        return {key: to_python(entry.node) for key, entry in node.value.items()}
    if isinstance(node.value, list):
        return [to_python(item) for item in node.value]
    return node.value


def locate(root: Node, path: KeyPath) -> Location:
    """Return the location of the key or list item to which a path leads.

    An empty path leads to the root. If a part of the path is missing in the tree, the result is the
    location of the last key that exists.
    """
    return list(_walk(root, path))[-1][0]


def is_broken(root: Node, path: KeyPath) -> bool:
    """Return whether a problem was reported for the path or for a node above it."""
    return any(node.broken for _, node in _walk(root, path))


def _walk(root: Node, path: KeyPath) -> Iterator[tuple[Location, Node]]:
    node = root
    yield node.location, node
    for part in path:
        if isinstance(node.value, dict) and part in node.value:
            entry = node.value[str(part)]
            node = entry.node
            yield entry.key, node
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            yield node.location, node
        else:
            return


def is_utf8_text(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8, that is, has no lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def from_python(
    value: object, location: Location, problems: list[Problem], path: KeyPath = ()
) -> Node:
    """Return the tree of a Python value, with one location for all its nodes.

    Tuples, paths and numpy scalars become lists, strings and numbers. As dataset, model or loss, a
    class, a function or arrays become a reference (`PythonObject`). Any other value that YAML
    cannot express becomes a node that is marked as invalid (`broken`).

    Args:
        value: the Python value.
        location: the location of all nodes.
        problems: list to which a problem is appended for each invalid node.
        path: the keys from the top level to the value.
    """
    if len(path) > MAX_DEPTH:
        return _broken(location, problems, path, "nested too deeply")
    if isinstance(value, Mapping):
        return _from_mapping(value, location, problems, path)
    if value is None or isinstance(value, bool):
        return Node(value, location)
    if isinstance(value, numbers.Real):
        number = _python_number(value)
        if isinstance(number, str):
            return _broken(location, problems, path, number)
        return Node(number, location)
    refused = f"a {type(value).__name__} cannot be written in YAML"
    if (given := object_of(value)) is not None:
        if takes_object(path):
            return Node(given, location)
        message = f"{refused}, and only {PLACES} take Python objects; {file_instead(given)}"
        return _broken(location, problems, path, message)
    if takes_object(path) and (message := refusal(value, path)):
        return _broken(location, problems, path, message)
    if isinstance(value, list | tuple):
        items: list[Node] = []
        size = 1
        for index, item in enumerate(value):
            items.append(from_python(item, location, problems, (*path, index)))
            size = grown(size, items[-1], location, problems, path)
        return Node(items, location, size=size)
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        return _broken(location, problems, path, refused)
    if not is_utf8_text(text):
        return _broken(location, problems, path, "is not valid Unicode text")
    return Node(text if isinstance(text, PythonObject) else str.__str__(text), location)


def _python_number(value: numbers.Real) -> float | str:
    """Return a number as Python's own, or what is wrong with it."""
    if isinstance(value, numbers.Integral):
        is_long = abs(int(value)) >= 10**MAX_DIGITS
        return "number with too many digits" if is_long else int(value)
    try:
        return float(value)
    except OverflowError:
        return "is too large for a number"


def _from_mapping(
    value: Mapping[object, object], location: Location, problems: list[Problem], path: KeyPath
) -> Node:
    entries: dict[str, Entry] = {}
    size = 1
    for key, item in value.items():
        if isinstance(key, str) and is_utf8_text(key):
            name = str.__str__(key)
            node = from_python(item, location, problems, (*path, name))
            entries[name] = Entry(location, node)
            size = grown(size, node, location, problems, path)
        else:
            message = f"a key must be a string, got {value_text(key)}"
            problems.append(location.problem(path, message))
    return Node(entries, location, size=size)


def grown(
    size: int, child: Node, location: Location, problems: list[Problem], path: KeyPath
) -> int:
    """Return the size of a collection with one more child.

    Args:
        size: number of nodes so far.
        child: the new child.
        location: the location of a problem.
        problems: the problems so far, for the error.
        path: the keys from the top level to the collection.

    Raises:
        ExperimentError: the collection is larger than `MAX_SIZE`, for example because it contains
            the same large object many times.
    """
    size += child.size
    if size > MAX_SIZE:
        raise location.error(problems, f"more than {MAX_SIZE:,} values", path)
    return size


def _broken(location: Location, problems: list[Problem], path: KeyPath, message: str) -> Node:
    problems.append(location.problem(path, message))
    return Node(None, location, broken=True)
