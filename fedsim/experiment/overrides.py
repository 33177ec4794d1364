"""Overrides `key.path=value` from the command line, applied to the file's content before checks."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from fedsim.core.formatting import count_text
from fedsim.experiment.errors import ExperimentError, KeyPath, Problems, path_text, value_text
from fedsim.experiment.shapes import Shape, TaggedUnion, child_shape, chosen_shape
from fedsim.experiment.yaml_loader import (
    MAX_DEPTH,
    Entry,
    Location,
    Node,
    broken,
    from_python,
    is_utf8_text,
    parse_yaml,
)

COMMAND_LINE = Location("command line")


@dataclass(frozen=True)
class Override:
    """The new value of the key at `path`; `node` has the value and the place where it was given."""

    path: tuple[str, ...]
    node: Node


Overrides = Iterable[str | Override] | Mapping[str, object]


def parse_overrides(overrides: Overrides, problems: Problems) -> list[Override]:
    """Return the parsed overrides in the given order.

    They are new values, as `["federation.rounds=5"]` or `{"federation.rounds": 5}`. A problem is
    appended for each one that cannot be parsed.
    """
    if isinstance(overrides, str):  # one override, not its letters
        overrides = [overrides]
    parsed: list[Override] = []
    for item in overrides.items() if isinstance(overrides, Mapping) else overrides:
        try:
            parsed.append(item if isinstance(item, Override) else _parse(item, problems))
        except _OverrideError as error:
            problems.append(COMMAND_LINE.problem((), str(error)))
    return parsed


def apply_overrides(
    root: Node, overrides: Iterable[Override], shape: Shape, problems: Problems
) -> Node:
    """Return a copy of an experiment's parsed content with the overrides applied in order.

    Missing sections are created. Some keys, such as `partition.scheme` or `optimizer.name`, decide
    which other keys a section may have. If an override changes such a key, the keys that only the
    previous choice allows are removed. A new `model.name` removes the previous model's arguments.

    `shape` has the allowed keys of the whole file. A problem is appended for each override that
    cannot be applied.
    """
    for override in overrides:
        try:
            root = _set(root, override.path, (), override.node, shape)
        except _OverrideError as error:
            problems.append(override.node.location.problem(override.path, str(error)))
    return root


class _OverrideError(Exception):
    """What is no override, or cannot be set as its path does not exist."""


def _parse(given: str | tuple[object, object], problems: Problems) -> Override:
    """Return the override of a text `key.path=value`, or of a key and its value."""
    if isinstance(given, tuple):
        key, value = given
        path = _path(key if isinstance(key, str) else value_text(key))
        return Override(path, from_python(value, COMMAND_LINE, problems, path))
    key, equals, text = given.partition("=")
    if not equals:
        raise _OverrideError(f"{value_text(given)} is not an override; write key.path=value")
    path = _path(key.strip())
    return Override(path, _value(path, text, problems))


def _path(key: str) -> tuple[str, ...]:
    path = tuple(key.split("."))
    if not all(path) or not is_utf8_text(key) or len(path) > MAX_DEPTH:
        raise _OverrideError(f"{value_text(key)} is not a key; write key.path=value")
    return path


def _value(path: KeyPath, text: str, problems: Problems) -> Node:
    """Return the tree of an override's value, with the command line as its location."""
    if not text.strip():  # probably a shell variable without a value, not null
        message = "no value after '='; write null for no value, '' for an empty string"
        return broken(COMMAND_LINE, problems, path, message)
    mistakes: Problems = []
    try:
        node = parse_yaml(text, COMMAND_LINE.source, mistakes, has_lines=False)
    except ExperimentError as error:
        mistakes, node = list(error.problems), Node(None, COMMAND_LINE, broken=True)
    problems += [COMMAND_LINE.problem((*path, *each.path), each.message) for each in mistakes]
    return node


def _set(node: Node, path: tuple[str, ...], done: KeyPath, new: Node, shape: Shape) -> Node:
    """Return `node` with `new` set at `path`; `done` is the path from the root to `node`."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(node.value, list):
        index = _index(node.value, key, done)
        item = _set(node.value[index], rest, (*done, index), new, None)
        return replace(node, value=[*node.value[:index], item, *node.value[index + 1 :]])
    node = _with_tag(node, shape, key)
    if node.value is not None and not isinstance(node.value, dict):
        raise _OverrideError(f"{path_text(done)} is a single value and has no keys")
    entries = node.value or {}
    given = {name: entry.node.value for name, entry in entries.items()}
    below = child_shape(chosen_shape(shape, given), key)
    former = entries[key].node if key in entries else Node(None, new.location)
    entry = Entry(new.location, _set(former, rest, (*done, key), new, below))
    changed = {**entries, key: entry}
    has_args = isinstance(shape, type) and {"name", "args"} <= shape.model_fields.keys()
    if isinstance(shape, TaggedUnion) and key == shape.tag:
        before, after = shape.variant(former.value), shape.variant(entry.node.value)
        if before is not None and after is not None:  # drop the keys that only the former has
            gone = before.model_fields.keys() - after.model_fields.keys()
            changed = _without(changed, gone, entry.node)
    elif has_args and key == "name" and former.value != entry.node.value:
        args = changed.get("args")
        if args is not None and isinstance(args.node.value, dict):
            kept = _without(args.node.value, args.node.value.keys(), entry.node)
            changed["args"] = replace(args, node=replace(args.node, value=kept))
    location = node.location if node.value is not None else new.location
    return replace(node, value=changed, location=location)


def _index(items: list[Node], key: str, done: KeyPath) -> int:
    if not (key.isascii() and key.isdigit()):
        raise _OverrideError(f"{path_text(done)} is a list; use the number of an item")
    if len(key) > 9 or int(key) >= len(items):
        count = count_text(len(items), "item")
        raise _OverrideError(f"{path_text(done)} has {count}, counted from 0")
    return int(key)


def _with_tag(node: Node, shape: Shape, key: str) -> Node:
    """Return a bare name as the mapping `{tag: name}`, so that further keys can be set in it."""
    if not isinstance(shape, TaggedUnion) or not shape.takes_name:
        return node
    name = shape.default if node.value is None and key != shape.tag else node.value
    if not isinstance(name, str):
        return node
    return replace(node, value={shape.tag: Entry(node.location, replace(node, value=name))})


def _without(entries: dict[str, Entry], keys: Collection[str], chosen: Node) -> dict[str, Entry]:
    """Return the entries without those keys that come from another source than a chosen value."""
    source = chosen.location.source
    return {k: entry for k, entry in entries.items() if k not in keys or entry.key.source == source}
