"""Variants of a comparison file, turned into overrides of settings of the base experiment.

Every override keeps its location in the file, so that mistakes are reported there. `arm` names a
predefined baseline: a list of changes to the base, such as `arm: pooled` for all data in one place.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedsim.algorithms.algorithm import algorithms
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.core.python_objects import PythonObject
from fedsim.core.settings import written_name
from fedsim.experiment.errors import KeyPath, Problem, any_of, did_you_mean, path_text, value_text
from fedsim.experiment.overrides import Override
from fedsim.experiment.yaml_loader import Entry, Node, from_python, to_python

ARM = "arm"

Changes = dict[str, object]  # overrides of an experiment, as `{"key.path": value}`

_DRAWN_SCHEMES = ("iid", "dirichlet", "shards", "quantity")


class ArmError(ValueError):
    """Error of a predefined baseline (`arm`) that cannot be applied to the base experiment."""


@dataclass(frozen=True)
class Arm:
    """A predefined baseline of a federation, defined by changes to a base experiment.

    `note` says in the HTML report what the baseline protects and whom it trusts.
    """

    note: str
    changes: Callable[[Mapping[str, Any]], Changes]


def _clipping_only(base: Mapping[str, Any]) -> Changes:
    privacy = _at(base, "privacy")
    if base.get("task") == "pate" or not privacy or not isinstance(privacy, Mapping):
        raise ArmError(
            "clipping_only needs privacy settings that bound gradients or updates; set "
            "privacy.max_grad_norm in the base"
        )
    mechanism = written_name(privacy.get("mechanism", GRADIENT_PERTURBATION))
    if mechanism != GRADIENT_PERTURBATION:
        raise ArmError(
            f"clipping_only clips gradients or updates, and mechanism: {mechanism} clips none; set "
            f"privacy.mechanism: {GRADIENT_PERTURBATION} in the base"
        )
    if privacy.get("clients") or _at(base, "privacy.clipping.groups"):
        raise ArmError(
            "clipping_only takes the noise from everybody, and the base gives noise or bounds to "
            "single clients or groups; remove privacy.clients and privacy.clipping.groups there"
        )
    without = {"target_epsilon": None, "on_exhausted": "refuse", "noise_correlation": "none"}
    return {
        "privacy.noise_multiplier": 0.0,
        **_replaced(base, "privacy", without),
        **_local_trust(base),
        **_without_noise_weights(base),
    }


def _local_only(base: Mapping[str, Any]) -> Changes:
    return {
        "federation.strategy": "local_only",
        "federation.weighting": "uniform",
        **_replaced(base, "federation", {"ema_decay": None}),
        **_alone(base),
    }


def _pooled(base: Mapping[str, Any]) -> Changes:
    scheme, clients = _at(base, "data.partition.scheme"), _at(base, "data.partition.num_clients")
    if scheme not in _DRAWN_SCHEMES or not isinstance(clients, int):
        raise ArmError(
            f"pooled gives one client the examples of all, and scheme {scheme} may leave some out; "
            f"use it with {', '.join(_DRAWN_SCHEMES)} and num_clients"
        )
    if _at(base, "privacy.unit") == "client":
        raise ArmError(
            "pooled has one client, so unit: client would protect everything from everybody; set "
            "privacy.unit: example with max_grad_norm in the base"
        )
    if _at(base, "privacy.clients"):
        raise ArmError(
            "pooled has one client, and privacy.clients of the base gives clients budgets of their "
            "own; remove privacy.clients from the base"
        )
    drawn = _at(base, "federation.clients_per_round")
    drawn = drawn if isinstance(drawn, int) else clients
    changes: Changes = {
        "data.partition": {"scheme": "iid", "num_clients": 1},
        "federation.clients_per_round": 1,
        "federation.weighting": "uniform",
        **_alone(base),
        **_replaced(base, "federation", {"participation": {"scheme": "uniform"}}),
    }
    kind = algorithms().get(written_name(_at(base, "federation.strategy")))
    if kind is not None and (kind.uses_each_update or kind.weighs_steps):
        changes["federation.strategy"] = "fedavg"
    if base.get("faults"):
        changes["faults"] = []
    if isinstance(batch := _at(base, "local.batch_size"), int):
        changes["local.batch_size"] = batch * drawn
    if isinstance(rate := _at(base, "privacy.sampling.rate"), float):
        changes["privacy.sampling.rate"] = rate * drawn / clients
    return changes


def _perturbed(base: Mapping[str, Any], *, kind: str) -> Changes:
    of_gradients = {"max_grad_norm": None, "sampling": "poisson", "clipping": "flat"}
    return {
        "privacy.mechanism": {"name": kind},
        **_alone(base),
        **_replaced(base, "privacy", {**of_gradients, "noise_correlation": "none"}),
    }


def _replaced(base: Mapping[str, Any], name: str, values: Mapping[str, object]) -> Changes:
    """Return new values of those keys of a section that the base has."""
    section = _at(base, name)
    known = section if isinstance(section, Mapping) else {}
    return {f"{name}.{key}": value for key, value in values.items() if key in known}


def _alone(base: Mapping[str, Any]) -> Changes:
    """Return the changes of a baseline that removes secure aggregation."""
    changes = {} if base.get("secure_aggregation") is None else {"secure_aggregation": None}
    return {**changes, **_local_trust(base)}


def _local_trust(base: Mapping[str, Any]) -> Changes:
    trust = _at(base, "privacy.trust")
    return {} if trust is None or written_name(trust) == "local" else {"privacy.trust": "local"}


def _without_noise_weights(base: Mapping[str, Any]) -> Changes:
    weighting = written_name(_at(base, "federation.weighting"))
    return {"federation.weighting": "examples"} if weighting == "examples_over_noise" else {}


def _at(content: object, key: str) -> Any:
    """Return the value at a key such as `privacy.trust`; None if there is none."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


ARMS: dict[str, Arm] = {
    "plain": Arm(
        "no privacy: nobody's examples are protected from anyone who sees updates or models.",
        lambda base: {"privacy": None, **_without_noise_weights(base)},
    ),
    "clipping_only": Arm(
        "no privacy: gradients or updates are clipped and get no noise, so ε is infinite and "
        "nobody's examples are protected from anyone who sees updates or models.",
        _clipping_only,
    ),
    "pooled": Arm(
        "one holder of all examples is trusted with them; its ε protects them from those who see "
        "models, and nothing protects them from the holder.",
        _pooled,
    ),
    "local_only": Arm(
        "each client is trusted with its own examples; its ε protects them from those who see its "
        "model. Scores are means over the clients' own models.",
        _local_only,
    ),
    "output_perturbation": Arm(
        "as with noise on gradients, a server is not trusted; one release of a trained model has "
        "noise for the sensitivity of its training.",
        partial(_perturbed, kind="output_perturbation"),
    ),
    "input_perturbation": Arm(
        "nobody is trusted: the noisy examples themselves may be published, which is more than the "
        "other arms release.",
        partial(_perturbed, kind="input_perturbation"),
    ),
}


def arm_notes(arms: Mapping[str, str | None]) -> Iterator[str]:
    """Yield what each predefined baseline in `arms`, by variant, protects, and whom it trusts."""
    for arm, entry in ARMS.items():
        if names := [variant for variant, other in arms.items() if other == arm]:
            yield f"{', '.join(names)} (arm {arm}): {entry.note}"


GRID = "grid"
ONE_AT_A_TIME = "one_at_a_time"
MAX_VARIANTS = 500

NAME_RULE = "letters, digits, '.', '_', '+', '=' or '-', starting with a letter or a digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True)
class Variant:
    """A variant of a comparison file, before its experiments are checked."""

    name: str
    origin: str  # its key in the file; left out if its settings equal those of this variant
    overrides: tuple[Override, ...]
    arm: str | None = None


def expand_variants(
    variants: Mapping[str, Entry], base: object, overrides: list[Override], problems: list[Problem]
) -> list[Variant]:
    """Return the variants in the order of the file, one for each combination of values of a grid.

    Each variant begins with the overrides for all, without the keys that it sets itself. All
    mistakes are appended to `problems`. `base` is the content of the base experiment; None where
    it cannot be read.
    """
    expanded: list[Variant] = []
    for name, entry in variants.items():
        path = ("variants", name)
        if not _NAME.fullmatch(name):
            problems.append(entry.key.problem(path, f"a variant's name must be {NAME_RULE}"))
        elif entry.node.value is None or isinstance(entry.node.value, dict):
            for variant in _expand(name, entry, base, problems):
                unset = _unset_by(variant.overrides, overrides)
                expanded.append(replace(variant, overrides=(*unset, *variant.overrides)))
        elif not entry.node.broken:
            given = value_text(to_python(entry.node))
            message = f"must be a mapping of what to change, got {given}"
            problems.append(entry.key.problem(path, message))
        if len(expanded) > MAX_VARIANTS:
            problems.append(entry.key.problem(path, f"more than {MAX_VARIANTS} variants in all"))
            return expanded[:MAX_VARIANTS]
    seen: dict[str, Variant] = {}  # by a name that some file systems do not tell from others
    for variant in expanded:
        former = seen.setdefault(variant.name.casefold(), variant)
        if former is not variant:
            message = f"a second variant is called {path_text((variant.name,))}"
            if former.name != variant.name:
                message = f"{variant.name!r} and {former.name!r} differ in capitals only"
            place = variants[variant.origin].key
            problems.append(place.problem(("variants", variant.origin), message))
    return expanded


def _expand(name: str, entry: Entry, base: object, problems: list[Problem]) -> Iterator[Variant]:
    path: KeyPath = ("variants", name)
    entries = dict(entry.node.entries)
    grid, single = entries.pop(GRID, None), entries.pop(ONE_AT_A_TIME, None)
    arm = entries.pop(ARM, None)
    if grid is not None and single is not None:
        message = "grid and one_at_a_time exclude each other: write two variants"
        problems.append(single.key.problem((*path, ONE_AT_A_TIME), message))
    fixed = list(_flatten(replace(entry.node, value=entries), (), base))
    varied, kind = single or grid, GRID if single is None else ONE_AT_A_TIME
    axes = [] if varied is None else _axes(varied, (*path, kind), problems)
    firsts = [axis[0] for axis in axes]
    # One at a time, a key may also be one of the variant itself, the centre.
    own = fixed if single is not None else [*fixed, *firsts]
    problems += [*_reserved(own, path), *_reserved(firsts, path)]
    if arm is not None:
        fixed = [*_unset_by(own, _arm(arm, path, base, problems)), *fixed]
    combined = points(axes, one_at_a_time=single is not None)
    for point in itertools.islice(combined, MAX_VARIANTS + 1):
        paths = {override.path for override in point.values()}
        kept = (override for override in fixed if override.path not in paths)
        chosen = (*kept, *point.values())
        yield Variant("-".join([name, *point]), name, chosen, arm and str(arm.node.value))


def _unset_by(given: Iterable[Override], overrides: Iterable[Override]) -> Iterator[Override]:
    """Yield those overrides of which `given` sets neither the key nor a section with the key."""
    paths = {override.path for override in given}
    for override in overrides:
        if not paths & set(itertools.accumulate((key,) for key in override.path)):
            yield override


def _arm(arm: Entry, path: KeyPath, base: object, problems: list[Problem]) -> list[Override]:
    """Return the overrides of a baseline."""
    name = to_python(arm.node)
    try:
        if not isinstance(name, str) or name not in ARMS:
            hint = did_you_mean(str(name), ARMS) or f"; choose from {any_of(list(ARMS))}"
            raise ArmError(f"no such arm: {value_text(name)}{hint}")
        # A base that is no mapping is reported already.
        changes = ARMS[name].changes(base) if isinstance(base, dict) else {}
    except ArmError as error:
        problems.append(arm.key.problem((*path, ARM), str(error)))
        return []
    return [
        Override(tuple(key.split(".")), from_python(value, arm.key, problems))
        for key, value in changes.items()
    ]


def changes_of(overrides: Iterable[Override]) -> dict[str, object]:
    """Return overrides as `{"key.path": value}`."""
    return {".".join(override.path): to_python(override.node) for override in overrides}


# Values of varied keys, by their labels in the names of variants, such as `steps=1`.
Point = dict[str, Override]


def points(axes: Sequence[Sequence[Override]], *, one_at_a_time: bool = False) -> Iterator[Point]:
    """Return every combination of values, with one value of each key.

    With `one_at_a_time`, return a point without values, and then one for each value of each key.
    """
    labels = axis_labels([axis[0].path for axis in axes])
    named = [
        [(f"{label}={value_label(n, override.node)}", override) for n, override in enumerate(axis)]
        for label, axis in zip(labels, axes, strict=True)
    ]
    if one_at_a_time:
        return map(dict, [(), *((pair,) for axis in named for pair in axis)])
    return map(dict, itertools.product(*named))


def _flatten(node: Node, path: tuple[str, ...], base: object) -> Iterator[Override]:
    """Yield an override for each value of a variant; mappings are merged into those of the base."""
    for key, entry in node.entries.items():
        inner = (*path, *key.split("."))
        if entry.node.entries and isinstance(_at(base, ".".join(inner)), dict | None):
            yield from _flatten(entry.node, inner, base)
        else:
            yield Override(inner, replace(entry.node, location=entry.key))


def merged(overrides: Iterable[Override], base: Node) -> list[Override]:
    """Return one override for each single value; an override with a mapping is split by key."""
    entries = {".".join(given.path): Entry(given.node.location, given.node) for given in overrides}
    return list(_flatten(replace(base, value=entries), (), to_python(base)))


def _axes(grid: Entry, path: KeyPath, problems: list[Problem]) -> list[list[Override]]:
    """Return the overrides of a grid, one list for each axis."""
    if not grid.node.entries:
        given = value_text(to_python(grid.node))
        message = f"must map keys to lists of values, such as {{local.steps: [1, 5]}}, got {given}"
        problems.append(grid.key.problem(path, message))
    axes = []
    for key, entry in grid.node.entries.items():
        values = entry.node.value
        if isinstance(values, list) and values:
            axes.append([Override(tuple(key.split(".")), item) for item in values])
        else:
            message = f"must be a list of values, got {value_text(to_python(entry.node))}"
            if isinstance(values, dict):
                message += "; write the whole key on one line: section.key: [...]"
            problems.append(entry.key.problem((*path, key), message))
    return axes


def _reserved(overrides: list[Override], path: KeyPath) -> Iterator[Problem]:
    """Yield problems for keys that no variant may set, and for keys that are set twice."""
    seen: set[tuple[str, ...]] = set()
    for override in overrides:
        place = override.node.location
        if not all(override.path):
            message = "is not a key; write key.path: value"
            yield place.problem((*path, ".".join(override.path)), message)
        elif override.path == ("seed",):
            message = "every variant runs with the seeds of seeds:; leave it out"
            yield place.problem((*path, "seed"), message)
        elif override.path in seen:
            yield place.problem((*path, *override.path), "is set twice in this variant")
        seen.add(override.path)


def axis_labels(paths: list[tuple[str, ...]]) -> list[str]:
    """Return a label for each varied key path: its last key, or all keys if that is ambiguous."""
    last = [path[-1] for path in paths]
    return [path[-1] if last.count(path[-1]) == 1 else ".".join(path) for path in paths]


def value_label(number: int, node: Node) -> str:
    """Return the text of a value in a variant's name, such as 8.0 or 64x32.

    If the value contains a mapping, the text is `number`, its position in the list of values.
    """
    value = to_python(node)
    parts = value if isinstance(value, list) else [value]
    if any(isinstance(part, dict | list) for part in parts):
        return str(number)
    names = [p.name if isinstance(p, PythonObject) else p for p in parts]
    texts = [name if isinstance(name, str) else value_text(name) for name in names]
    return "x".join(_NOT_IN_NAMES.sub("_", text) for text in texts)
