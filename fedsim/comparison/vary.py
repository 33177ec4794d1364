"""Variants of an experiment file from the command line: `--vary KEY=VALUE,...`.

Several keys give the product of their values. The result is the content of a comparison file, which
is loaded, run and written as any other.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsim.comparison.load import LoadedComparison, load_tree
from fedsim.comparison.variants import axis_labels, value_label
from fedsim.experiment import ExperimentError, Problem
from fedsim.experiment.errors import value_text
from fedsim.experiment.load import read_yaml
from fedsim.experiment.overrides import COMMAND_LINE, Override, Overrides, parse_overrides
from fedsim.experiment.tree import Entry, Node, from_python, to_python
from fedsim.experiment.yaml_loader import parse_yaml

MAX_VARIED = 100

_MAX_NAME_CHARACTERS = 100
_BASE = "base"  # name of the variant without a varied key
_PRIVACY = ("privacy",)
# Either of the two sets the noise: a value of one replaces the other, and null is no privacy.
_NOISE_KEYS = (("privacy", "target_epsilon"), ("privacy", "noise_multiplier"))

Vary = Mapping[str, Sequence[object]]


@dataclass(frozen=True)
class _Axis:
    """The values of one key, with the words for each in names."""

    path: tuple[str, ...]
    values: tuple[tuple[str, Override], ...]


def parse_vary(texts: Sequence[str]) -> dict[str, list[object]]:
    """Return `{"key.path": [value, ...]}` of `key.path=value,value`, as YAML reads the values.

    Raises:
        ExperimentError: with every text that cannot be read.
    """
    problems: list[Problem] = []
    found: dict[str, list[object]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values.strip():
            message = f"--vary {text!r} has no values; write --vary key.path=value,value"
            problems.append(COMMAND_LINE.problem((), message))
            continue
        if key.strip() in found:
            problems.append(COMMAND_LINE.problem((key.strip(),), "is varied twice"))
            continue
        mistakes: list[Problem] = []
        try:
            parsed = to_python(parse_yaml(f"[{values}]", COMMAND_LINE.source, mistakes))
        except ExperimentError as error:
            mistakes, parsed = list(error.problems), []
        problems += [COMMAND_LINE.problem((key.strip(),), one.message) for one in mistakes]
        found[key.strip()] = parsed if isinstance(parsed, list) else [parsed]
    if problems:
        raise ExperimentError(problems)
    return found


def load_varied(
    path: str | Path,
    vary: Vary,
    *,
    overrides: Overrides = (),
    one_at_a_time: bool = False,
    changes: Mapping[str, object],
) -> LoadedComparison:
    """Load the comparison of an experiment's variants.

    Args:
        path: the experiment file.
        vary: values by key; of several keys every combination is a variant. A null for
            `privacy.target_epsilon` or `privacy.noise_multiplier` is a variant without privacy.
        overrides: settings of all variants.
        one_at_a_time: whether each value is a variant by itself, with all other keys as in the
            file, in place of every combination; the file itself is the first variant, `base`.
        changes: further keys of the comparison, such as `seeds`; without `baseline` the first
            variant is the baseline.

    Raises:
        ExperimentError: with every mistake of the experiment and of every variant.
    """
    problems: list[Problem] = []
    base = read_yaml(path, problems)
    fixed = parse_overrides(overrides, problems)
    axes = _axes(vary, problems)
    _refuse_comparison(base, problems)
    if problems:
        raise ExperimentError(problems)
    variants = _variants(_points(axes, one_at_a_time, problems), fixed, base)
    content: dict[str, object] = {
        "name": _name(base, Path(path), axes),
        "base": str(path),
        "baseline": next(iter(variants), None),
        **changes,
    }
    tree = from_python(content, COMMAND_LINE, problems)
    entries = {
        name: Entry(COMMAND_LINE, _mapping({".".join(one.path): one.node for one in own}))
        for name, own in variants.items()
    }
    whole = {**_entries(tree), "variants": Entry(COMMAND_LINE, replace(tree, value=entries))}
    centre = _BASE if one_at_a_time else None
    whole_tree = replace(tree, value=whole)
    return load_tree(whole_tree, Path(), "comparison", problems, centre=centre)


def _axes(vary: Vary, problems: list[Problem]) -> list[_Axis]:
    paths = [tuple(key.split(".")) for key in vary]
    if all(path in paths for path in _NOISE_KEYS):
        message = "privacy.target_epsilon and privacy.noise_multiplier exclude each other: vary one"
        problems.append(COMMAND_LINE.problem(_NOISE_KEYS[0], message))
    axes = []
    for (key, values), path, label in zip(vary.items(), paths, axis_labels(paths), strict=True):
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            message = f"the values to compare must be a list, got {value_text(values)}"
            problems.append(COMMAND_LINE.problem((key,), message))
            continue
        if path == ("seed",):
            message = "every variant runs with every seed; use --seeds"
            problems.append(COMMAND_LINE.problem(path, message))
            continue
        found: dict[str, Override] = {}
        for number, value in enumerate(values):
            (one,) = parse_overrides({key: value}, problems) or (None,)
            if one is None:
                break
            name = f"{label}={value_label(number, one.node)}"
            if name in found:
                problems.append(COMMAND_LINE.problem(path, f"{value_text(value)} is given twice"))
            found[name] = one
        axes.append(_Axis(path, tuple(found.items())))
    return axes


def _points(
    axes: Sequence[_Axis], one_at_a_time: bool, problems: list[Problem]
) -> list[tuple[tuple[str, Override], ...]]:
    """Return the values of each variant; none is the file itself."""
    sizes = [len(axis.values) for axis in axes]
    total = 1 + sum(sizes) if one_at_a_time else math.prod(sizes)
    if total > MAX_VARIED:
        message = (
            f"--vary gives {total:,} variants, at most {MAX_VARIED} are allowed: vary fewer values,"
            " or write a comparison file with a grid"
        )
        raise ExperimentError([*problems, COMMAND_LINE.problem((), message)])
    if one_at_a_time:
        return [(), *((value,) for axis in axes for value in axis.values)]
    return list(itertools.product(*(axis.values for axis in axes)))


def _variants(
    points: Sequence[tuple[tuple[str, Override], ...]], fixed: Sequence[Override], base: Node
) -> dict[str, list[Override]]:
    """Return the overrides of each variant by its name; equal variants are one."""
    found: dict[str, list[Override]] = {}
    for point in points:
        named = _without_privacy(list(point))
        own = [one for _, override in named for one in _with_other_noise(override, base, fixed)]
        changed = {one.path for one in own}
        kept = [
            one
            for one in fixed
            if one.path not in changed and not (_PRIVACY in changed and one.path[:1] == _PRIVACY)
        ]
        found.setdefault("-".join(name for name, _ in named) or _BASE, [*kept, *own])
    return found


def _without_privacy(point: list[tuple[str, Override]]) -> list[tuple[str, Override]]:
    """Return a point with `privacy: null` for a null noise, and then no other key of privacy."""
    without = [
        (name, Override(_PRIVACY, one.node))
        for name, one in point
        if one.node.value is None and not one.node.broken and one.path in (*_NOISE_KEYS, _PRIVACY)
    ]
    if not without:
        return point
    return [*without, *(pair for pair in point if pair[1].path[:1] != _PRIVACY)]


def _with_other_noise(override: Override, base: Node, fixed: Sequence[Override]) -> list[Override]:
    """Return an override of one key of the noise with the removal of the other one, if given."""
    if override.path not in _NOISE_KEYS:
        return [override]
    (other,) = (path for path in _NOISE_KEYS if path != override.path)
    section = _entries(base).get("privacy")
    given = section is not None and other[1] in _entries(section.node)
    if not given and other not in [one.path for one in fixed]:
        return [override]
    return [Override(other, Node(None, COMMAND_LINE)), override]


def _refuse_comparison(base: Node, problems: list[Problem]) -> None:
    entries = _entries(base)
    if "base" in entries and "variants" in entries:
        message = "this is a comparison, which has variants of its own; leave --vary out"
        problems.append(base.location.problem((), message))


def _name(base: Node, path: Path, axes: Sequence[_Axis]) -> str:
    """Return the name of the comparison: that of the experiment and what is varied."""
    entry = _entries(base).get("name")
    own = entry.node.value if entry is not None and isinstance(entry.node.value, str) else path.stem
    labels = axis_labels([axis.path for axis in axes])
    return f"{own}-by-{'-'.join(labels)}"[:_MAX_NAME_CHARACTERS]


def _entries(node: Node) -> dict[str, Entry]:
    return node.value if isinstance(node.value, dict) else {}


def _mapping(values: Mapping[str, Node]) -> Node:
    entries = {key: Entry(COMMAND_LINE, node) for key, node in values.items()}
    return Node(entries, COMMAND_LINE)
