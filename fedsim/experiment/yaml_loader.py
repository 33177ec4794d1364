"""Reader of strict YAML into a tree of values, each with its location in the file.

Scalars follow the YAML 1.2 core schema (1e-5 is a number, `no` is a string, 010 is ten). Keys must
be strings and unique, tags are refused, and an alias may not contain itself. The values are built
from PyYAML's events, since only they distinguish plain scalars from quoted ones.

The location of a mistake is looked up in the tree by its key path. Nodes are immutable and may be
shared, as YAML aliases are.
"""

import numbers
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import yaml
from yaml import events

from fedsim.core.python_objects import (
    PLACES,
    PythonObject,
    file_instead,
    object_of,
    refusal,
    takes_object,
)
from fedsim.experiment.errors import (
    ExperimentError,
    KeyPath,
    Problem,
    Problems,
    shorten,
    value_text,
)

MAX_DEPTH = 64
MAX_SIZE = 100_000
MAX_DIGITS = 1000  # Python prints at most 4,300 digits
_BYTE_ORDER_MARK = "\ufeff"

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

    def error(self, problems: Problems, message: str, path: KeyPath = ()) -> ExperimentError:
        """Return the error that ends the reading: all problems so far, and one at this place."""
        return ExperimentError([*problems, self.problem(path, message)])


@dataclass(frozen=True)
class Node:
    """A value of a YAML file: a scalar, or the children of a list or a mapping."""

    value: "YamlScalar | list[Node] | dict[str, Entry]"
    location: Location  # where the value starts
    broken: bool = False  # a problem was reported; those that follow from it are not
    size: int = 1  # number of nodes in the subtree, where each use of an alias counts
    empty: bool = False  # no text in the file, which YAML reads as null

    @property
    def entries(self) -> "dict[str, Entry]":
        """The children of a mapping by key; empty if the value is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}

    def places_on(self, path: KeyPath) -> "Iterator[tuple[Location, Node]]":
        """Yield (location, node) of this node and each key or list item on a path that exists."""
        node = self
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


def is_utf8_text(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8, that is, has no lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def from_python(value: object, location: Location, problems: Problems, path: KeyPath = ()) -> Node:
    """Return the tree of a Python value, with one location for all its nodes.

    Tuples, paths and numpy scalars become lists, strings and numbers. As dataset, model or loss, a
    class, a function or arrays become a reference (`PythonObject`). Any other value that YAML
    cannot express becomes a node that is marked as invalid (`broken`), with a problem for it.
    """
    if len(path) > MAX_DEPTH:
        return broken(location, problems, path, "nested too deeply")
    if isinstance(value, Mapping):
        return _from_mapping(value, location, problems, path)
    if value is None or isinstance(value, bool):
        return Node(value, location)
    if isinstance(value, numbers.Integral):
        if abs(int(value)) >= 10**MAX_DIGITS:
            return broken(location, problems, path, "number with too many digits")
        return Node(int(value), location)
    if isinstance(value, numbers.Real):
        try:
            return Node(float(value), location)
        except OverflowError:
            return broken(location, problems, path, "is too large for a number")
    refused = f"a {type(value).__name__} cannot be written in YAML"
    if (given := object_of(value)) is not None:
        if takes_object(path):
            return Node(given, location)
        message = f"{refused}, and only {PLACES} take Python objects; {file_instead(given)}"
        return broken(location, problems, path, message)
    if takes_object(path) and (message := refusal(value, path)):
        return broken(location, problems, path, message)
    if isinstance(value, list | tuple):
        items: list[Node] = []
        size = 1
        for index, item in enumerate(value):
            items.append(from_python(item, location, problems, (*path, index)))
            size = grown(size, items[-1], location, problems, path)
        return Node(items, location, size=size)
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        return broken(location, problems, path, refused)
    if not is_utf8_text(text):
        return broken(location, problems, path, "is not valid Unicode text")
    return Node(text if isinstance(text, PythonObject) else str.__str__(text), location)


def _from_mapping(
    value: Mapping[object, object], location: Location, problems: Problems, path: KeyPath
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


def grown(size: int, child: Node, location: Location, problems: Problems, path: KeyPath) -> int:
    """Return the size of a collection with one more child; above `MAX_SIZE` an ExperimentError."""
    size += child.size
    if size > MAX_SIZE:
        raise location.error(problems, f"more than {MAX_SIZE:,} values", path)
    return size


def broken(location: Location, problems: Problems, path: KeyPath, message: str) -> Node:
    """Return the node of a value that cannot be used, after a problem with it is reported."""
    problems.append(location.problem(path, message))
    return Node(None, location, broken=True)


_CONSTANTS: dict[str, YamlScalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
CORE_PATTERNS = {"int": _INT, "float": _FLOAT}  # a string of this form needs quotes
# YAML's non-printable characters, and three that PyYAML, unlike YAML 1.2 and editors, reads as line
# breaks: a line that looks like a comment could hold a key.
_FORBIDDEN = re.compile("[^\t\n\r -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_Place = Callable[[int, int], Location]  # the location of a line and a column

# PyYAML's most frequent errors, in plain words.
_PARSER_MESSAGES = (
    (r"found character '\\t' that cannot start", "a tab cannot be used here; indent with spaces"),
    (r"mapping values are not allowed", "':' is not allowed here; check the indentation above"),
    (r"could not find expected ':'", "expected 'key: value'"),
    (r"expected <block end>", "the indentation does not fit the lines above"),
    (r"expected the node content", "a value is missing here"),
    (r"found unexpected end of stream", "the quote opened here is never closed"),
    (r"expected '?,'? or '\]'", "expected ',' or ']'; is the list closed?"),
    (r"expected '?,'? or '\}'", "expected ',' or '}'; is the mapping closed?"),
)


def parse_yaml(
    content: str | bytes, source: str, problems: Problems, *, has_lines: bool = True
) -> Node:
    """Return the values of a YAML document, each with its location in the file `source`.

    Mistakes that do not stop the reading are appended to `problems`: a duplicate key (the first one
    counts), a key that is not a string, a tag. If the text is not one YAML document, an
    ExperimentError includes them.
    """
    place = partial(Location, source) if has_lines else lambda line, column: Location(source)
    return _Builder(_text(content, place, problems), place, problems).document()


def core_scalar(text: str) -> YamlScalar:
    """Return an unquoted scalar's value (YAML 1.2 core schema); too many digits: ValueError."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"integers have at most {MAX_DIGITS} digits")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.match(text):
        is_word = text[-1].isalpha()  # .inf, .nan: Python spells them without the dot
        return float(text.replace(".", "") if is_word else text)
    return text


def _text(content: str | bytes, place: _Place, problems: Problems) -> str:
    try:
        text = content.decode() if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode().removeprefix(_BYTE_ORDER_MARK)
        raise _after(before, place).error(problems, "the file is not UTF-8 text") from error
    text = text.removeprefix(_BYTE_ORDER_MARK)
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        location = _after(text[: forbidden.start()], place)
        code = f"U+{ord(forbidden.group()):04X}"
        raise location.error(problems, f"character {code} is not allowed in YAML")
    return text


def _after(text: str, place: _Place) -> Location:
    """Return the location of the first character after `text`."""
    lines = re.split(r"\r\n|\r|\n", text)
    return place(len(lines), len(lines[-1]) + 1)


class _Builder:
    """Builder of the tree of one document from PyYAML's events."""

    def __init__(self, text: str, place: _Place, problems: Problems) -> None:
        self._loader = yaml.BaseLoader(text)
        self._place = place
        self._problems = problems
        self._anchors: dict[str, Node | None] = {}  # None: still being built

    def document(self) -> Node:
        self._next()  # the start of the stream
        first = self._next()
        if isinstance(first, events.StreamEndEvent):
            raise self._place(1, 1).error(self._problems, "the file is empty")
        root = self._node(self._next(), ())
        self._next()  # the end of the document
        after = self._next()
        if not isinstance(after, events.StreamEndEvent):
            raise self._stop(after, "a second document starts here; a file holds one")
        return root

    def _next(self) -> events.Event:
        try:
            return self._loader.get_event()
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error) from error
        except (ValueError, OverflowError) as error:  # an escape beyond Unicode, a huge version
            location = self._at(self._loader.get_mark())
            raise location.error(self._problems, "not valid YAML: bad number") from error

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> ExperimentError:
        problem = " ".join(str(error.problem or error.context or "syntax error").split())
        mark = error.problem_mark or error.context_mark
        if "end of stream" in problem and error.context_mark:
            mark = error.context_mark
        for pattern, words in _PARSER_MESSAGES:
            if re.match(pattern, problem):
                problem = words
        location = self._at(mark) if mark else self._place(1, 1)
        return location.error(self._problems, f"not valid YAML: {problem}")

    def _node(self, event: events.Event, path: KeyPath) -> Node:
        if isinstance(event, events.AliasEvent):
            return self._alias(event, path)
        if len(path) > MAX_DEPTH:
            raise self._stop(event, "nested too deeply")
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        if isinstance(event, events.MappingStartEvent):
            node = self._mapping(event, path)
        elif isinstance(event, events.SequenceStartEvent):
            node = self._sequence(event, path)
        elif isinstance(event, events.ScalarEvent):
            node = self._scalar(event, path)
        else:
            raise self._stop(event, "not valid YAML")
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _alias(self, event: events.AliasEvent, path: KeyPath) -> Node:
        name = event.anchor
        if name not in self._anchors:
            raise self._stop(event, f"alias *{name} has no anchor &{name} before it", path)
        node = self._anchors[name]
        if node is None:
            raise self._stop(event, f"alias *{name} contains itself", path)
        return node

    def _scalar(self, event: events.ScalarEvent, path: KeyPath) -> Node:
        location = self._at(event.start_mark)
        if self._has_tag(event, path):
            return Node(None, location, broken=True)
        is_plain = event.style is None  # else quoted or a block: always a string
        try:
            value = core_scalar(event.value) if is_plain else event.value
        except ValueError as error:
            raise self._stop(event, "number with too many digits", path) from error
        if isinstance(value, str) and not is_utf8_text(value):
            raise self._stop(event, "is not valid Unicode text", path)
        return Node(value, location, empty=is_plain and not event.value)

    def _sequence(self, event: events.SequenceStartEvent, path: KeyPath) -> Node:
        broken = self._has_tag(event, path)
        items: list[Node] = []
        size = 1
        while not isinstance(child := self._next(), events.SequenceEndEvent):
            items.append(self._node(child, (*path, len(items))))
            size = grown(size, items[-1], self._at(child.start_mark), self._problems, path)
        return Node(items, self._at(event.start_mark), broken, size)

    def _mapping(self, event: events.MappingStartEvent, path: KeyPath) -> Node:
        broken = self._has_tag(event, path)
        entries: dict[str, Entry] = {}
        size = 1
        while not isinstance(child := self._next(), events.MappingEndEvent):
            key = self._key(child, path)
            name = key.value if isinstance(key.value, str) else value_text(key.value)
            location = self._at(child.start_mark)
            node = self._node(self._next(), (*path, name))
            size = grown(size, node, location, self._problems, path)
            if not isinstance(key.value, str):
                mistake = "" if key.broken else f'a key must be a string; write "{name}"'
            elif name in entries:
                line = entries[name].key.line
                fix = "write it once" if line is None else f"it is already on line {line}"
                mistake = f"duplicate key; {fix}"
            else:
                entries[name], mistake = Entry(location, node), ""
            if mistake:
                self._problems.append(location.problem((*path, name), mistake))
        return Node(entries, self._at(event.start_mark), broken, size)

    def _key(self, event: events.Event, path: KeyPath) -> Node:
        node = None if isinstance(event, events.CollectionStartEvent) else self._node(event, path)
        if node is None or isinstance(node.value, dict | list):
            raise self._stop(event, "a key must be a string", path)
        return node

    def _has_tag(
        self, event: events.ScalarEvent | events.CollectionStartEvent, path: KeyPath
    ) -> bool:
        if event.tag is None:
            return False
        tag = shorten(repr(event.tag.replace("tag:yaml.org,2002:", "!!"))[1:-1])
        location = self._at(event.start_mark)
        self._problems.append(location.problem(path, f"tag {tag} is not allowed; write the value"))
        return True

    def _at(self, mark: yaml.Mark) -> Location:
        return self._place(mark.line + 1, mark.column + 1)

    def _stop(self, event: events.Event, message: str, path: KeyPath = ()) -> ExperimentError:
        return self._at(event.start_mark).error(self._problems, message, path)
