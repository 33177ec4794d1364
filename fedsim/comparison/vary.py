"""Variants of an experiment file that the command line defines by `--vary KEY=VALUE,...`.

Each combination of the keys' values is a variant. The result is the content of a comparison file,
which is loaded, run and written like any other.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.comparison.load import BASE, LoadedComparison, load_tree
from fedsim.comparison.variants import axis_labels, value_label
from fedsim.experiment import ExperimentError, Problem
from fedsim.experiment.errors import value_text
from fedsim.experiment.load import read_yaml
from fedsim.experiment.overrides import COMMAND_LINE, Override, Overrides, parse_overrides
from fedsim.experiment.tree import Entry, Location, Node, from_python, to_python
from fedsim.experiment.yaml_loader import parse_yaml

MAX_VARIED = 100

_MAX_NAME_CHARACTERS = 100
_BASE = "base"  # name of the variant without a varied key
_PRIVACY = ("privacy",)
# Either of the two sets the noise: a value of one replaces the other, and null is no privacy.
_NOISE_KEYS = (("privacy", "target_epsilon"), ("privacy", "noise_multiplier"))

Vary = Mapping[str, Sequence[object]]


_Axes = dict[tuple[str, ...], dict[str, Override]]  # by key path and label, such as steps=1


def parse_vary(texts: Sequence[str], *, option: str = "--vary") -> dict[str, list[object]]:
    """Parse texts `key.path=value,value` into `{"key.path": [value, ...]}`; values are YAML.

    Args:
        texts: the values of the option.
        option: name of the option, for messages.

    Raises:
        ExperimentError: texts cannot be parsed; the error lists all of them.
    """
    problems: list[Problem] = []
    varied: dict[str, list[object]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values.strip():
            message = f"{option} {text!r} has no values; write {option} key.path=value,value"
            problems.append(COMMAND_LINE.problem((), message))
            continue
        if key.strip() in varied:
            problems.append(COMMAND_LINE.problem((key.strip(),), f"is given twice by {option}"))
            continue
        mistakes: list[Problem] = []
        try:
            parsed = to_python(parse_yaml(f"[{values}]", COMMAND_LINE.source, mistakes))
        except ExperimentError as error:
            mistakes, parsed = list(error.problems), []
        problems += [COMMAND_LINE.problem((key.strip(),), mistake.message) for mistake in mistakes]
        varied[key.strip()] = parsed if isinstance(parsed, list) else [parsed]
    if problems:
        raise ExperimentError(problems)
    return varied


def parse_tune(texts: Sequence[str]) -> dict[str, list[object] | None]:
    """Parse texts `key.path=value,value` into `{"key.path": [value, ...]}`.

    A text that is only `key.path` gives `{"key.path": None}`.

    Raises:
        ExperimentError: texts cannot be parsed; the error lists all of them.
    """
    without = {text.strip(): None for text in texts if "=" not in text}
    return {**without, **parse_vary([text for text in texts if "=" in text], option="--tune")}


def load_varied(
    source: str | Path | Mapping[str, Any],
    vary: Vary,
    *,
    overrides: Overrides = (),
    one_at_a_time: bool = False,
    changes: Mapping[str, object],
) -> LoadedComparison:
    """Load a comparison whose variants are one experiment with varied values.

    Args:
        source: path of the experiment file, or its content as a mapping.
        vary: values by key; every combination of values is a variant. None as value of
            `privacy.target_epsilon` or `privacy.noise_multiplier` means no privacy.
        overrides: settings for all variants.
        one_at_a_time: whether a variant changes only one key to one value, instead of every
            combination; the unchanged file is then the first variant, `base`.
        changes: further keys of the comparison file, such as `seeds`; the default `baseline` is the
            first variant.

    Raises:
        ExperimentError: the experiment or a variant has mistakes; the error lists all.
    """
    problems: list[Problem] = []
    given, path = None, Path(BASE)
    if isinstance(source, Mapping):
        base = given = from_python(source, Location(BASE), problems)
    else:
        path = Path(source)
        base = read_yaml(path, problems)
    fixed = parse_overrides(overrides, problems)
    axes = _axes(vary, problems)
    _refuse_comparison(base, problems)
    if problems:
        raise ExperimentError(problems)
    variants = _variants(_points(axes, one_at_a_time, problems), fixed, base)
    content: dict[str, object] = {
        "name": _name(base, path, axes),
        "base": str(path),
        "baseline": next(iter(variants.entries), None),
        **changes,
    }
    entries = from_python(content, COMMAND_LINE, problems).entries
    tree = _mapping({key: entry.node for key, entry in entries.items()} | {"variants": variants})
    centre = _BASE if one_at_a_time else None
    return load_tree(
        tree, Path(), "comparison", problems, overrides=fixed, centre=centre, given=given
    )


def _axes(vary: Vary, problems: list[Problem]) -> _Axes:
    paths = [tuple(key.split(".")) for key in vary]
    if all(path in paths for path in _NOISE_KEYS):
        message = "privacy.target_epsilon and privacy.noise_multiplier exclude each other: vary one"
        problems.append(COMMAND_LINE.problem(_NOISE_KEYS[0], message))
    axes: _Axes = {}
    for (key, values), path, label in zip(vary.items(), paths, axis_labels(paths), strict=True):
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            message = f"the values to compare must be a list, got {value_text(values)}"
            problems.append(COMMAND_LINE.problem((key,), message))
            continue
        if path == ("seed",):
            message = "every variant runs with every seed; use --seeds"
            problems.append(COMMAND_LINE.problem(path, message))
            continue
        overrides = axes.setdefault(path, {})
        for number, value in enumerate(values):
            (override,) = parse_overrides({key: value}, problems) or (None,)
            if override is None:
                break
            name = f"{label}={value_label(number, override.node)}"
            if name in overrides:
                problems.append(COMMAND_LINE.problem(path, f"{value_text(value)} is given twice"))
            overrides[name] = override
    return axes


def _points(
    axes: _Axes, one_at_a_time: bool, problems: list[Problem]
) -> list[tuple[tuple[str, Override], ...]]:
    """Return the (label, override) pairs of each variant; the unchanged file has none."""
    sizes = [len(values) for values in axes.values()]
    total = 1 + sum(sizes) if one_at_a_time else math.prod(sizes)
    if total > MAX_VARIED:
        message = (
            f"--vary gives {total:,} variants, at most {MAX_VARIED} are allowed: vary fewer values,"
            " or write a comparison file with a grid"
        )
        raise ExperimentError([*problems, COMMAND_LINE.problem((), message)])
    if one_at_a_time:
        return [(), *((pair,) for values in axes.values() for pair in values.items())]
    return list(itertools.product(*(values.items() for values in axes.values())))


def _variants(
    points: Sequence[tuple[tuple[str, Override], ...]], fixed: Sequence[Override], base: Node
) -> Node:
    """Return the entry `variants` of the comparison file; equal variants appear once."""
    variants: dict[str, Node] = {}
    for point in points:
        named = _without_privacy(list(point))
        overrides = [
            new for _, override in named for new in _with_other_noise(override, base, fixed)
        ]
        values = _mapping({".".join(override.path): override.node for override in overrides})
        variants.setdefault("-".join(name for name, _ in named) or _BASE, values)
    return _mapping(variants)


def _without_privacy(point: list[tuple[str, Override]]) -> list[tuple[str, Override]]:
    """Return a point where a null noise key becomes `privacy: null`, without other privacy keys."""
    without = [
        (name, Override(_PRIVACY, override.node))
        for name, override in point
        if override.node.value is None
        and not override.node.broken
        and override.path in (*_NOISE_KEYS, _PRIVACY)
    ]
    if not without:
        return point
    return [*without, *(pair for pair in point if pair[1].path[:1] != _PRIVACY)]


def _with_other_noise(override: Override, base: Node, fixed: Sequence[Override]) -> list[Override]:
    """Return the override, preceded by one that removes the other noise key if that is set."""
    if override.path not in _NOISE_KEYS:
        return [override]
    (other,) = (path for path in _NOISE_KEYS if path != override.path)
    section = base.entries.get("privacy")
    given = section is not None and other[1] in section.node.entries
    if not given and other not in [override.path for override in fixed]:
        return [override]
    return [Override(other, Node(None, COMMAND_LINE)), override]


def _refuse_comparison(base: Node, problems: list[Problem]) -> None:
    if {"base", "variants"} <= base.entries.keys():
        message = "this is a comparison, which has variants of its own; leave --vary out"
        problems.append(base.location.problem((), message))


def _name(base: Node, path: Path, axes: _Axes) -> str:
    """Return the comparison's name: the experiment's name and the varied keys."""
    entry = base.entries.get("name")
    name = None if entry is None else entry.node.value
    title = name if isinstance(name, str) else path.stem
    labels = axis_labels(list(axes))
    return f"{title}-by-{'-'.join(labels)}"[:_MAX_NAME_CHARACTERS]


def _mapping(values: Mapping[str, Node]) -> Node:
    entries = {key: Entry(COMMAND_LINE, node) for key, node in values.items()}
    return Node(entries, COMMAND_LINE)
