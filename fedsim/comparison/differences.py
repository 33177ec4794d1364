"""What variants differ in and must share: settings, units of privacy, and the start of a seed.

An ε that protects one example and an ε that protects everything of one client are different
promises. No ranking and no difference may have both.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import yaml

from fedsim.experiment import Experiment
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.schema import flat_settings
from fedsim.runs.inputs import private_digest

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation


_NOT_COMPARED = ("name", "seed")
_MAX_TEXT_CHARACTERS = 60
_LETTERS = "ABCDEFGH"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class SettingsTable:
    """The settings in which variants differ.

    Attributes:
        keys: their keys, such as `local.steps`, in the order of the schema.
        values: for each variant its value under each key; a key that the variant lacks is left out.
        sections: for each variant, keys that are sections there and null in another variant.
    """

    keys: tuple[str, ...] = ()
    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    sections: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def text(self, variant: str, key: str) -> str:
        """Return a variant's value of a key as text: `–` where it has none."""
        if key in self.values[variant]:
            return setting_text(self.values[variant][key])
        return "given" if key in self.sections[variant] else "–"

    def among(self, names: Iterable[str]) -> "SettingsTable":
        """Return the keys in which these variants differ, with their values."""
        values = {name: self.values[name] for name in names if name in self.values}
        part = SettingsTable(self.keys, values, self.sections)
        keys = (key for key in self.keys if len({part.text(name, key) for name in values}) > 1)
        return SettingsTable(tuple(keys), values, self.sections)

    def to_json(self) -> dict[str, dict[str, object]]:
        """Return `settings` of `comparison.json`: by variant, the values that differ."""
        return {name: dict(found) for name, found in self.values.items()}


def compared_settings(experiment: Experiment) -> dict[str, object]:
    """Return all settings but name and seed as `{"key.path": value}`; lists stay whole."""
    settings = flat_settings(experiment)
    return {key: value for key, value in settings.items() if key not in _NOT_COMPARED}


def settings_table(variants: Mapping[str, Mapping[str, object]]) -> SettingsTable:
    """Return the keys in which variants differ, with their values.

    A key below a section that is null in a variant is compared among the other variants; the
    section itself is then one of the keys.

    Args:
        variants: `compared_settings` of each variant, by its name.
    """
    found = list(dict.fromkeys(key for one in variants.values() for key in one))
    tops = list(dict.fromkeys(key.partition(".")[0] for key in found))
    # A section before its keys, which another variant has.
    every = sorted(found, key=lambda key: (tops.index(key.partition(".")[0]), "." in key))
    sections = {
        name: frozenset(key for key in every if any(own.startswith(f"{key}.") for own in one))
        for name, one in variants.items()
    }
    keys = tuple(key for key in every if _differs(key, variants, sections))
    return SettingsTable(
        keys=keys,
        values={
            name: {key: one[key] for key in keys if key in one} for name, one in variants.items()
        },
        sections=sections,
    )


def _differs(
    key: str,
    variants: Mapping[str, Mapping[str, object]],
    sections: Mapping[str, frozenset[str]],
) -> bool:
    found = set()
    for name, one in variants.items():
        if key in one:
            found.add(repr(one[key]))
        elif key in sections[name]:
            found.add("a section")
        elif not any(one.get(parent, "") is None for parent in _parents(key)):
            found.add("no such key")
    return len(found) > 1


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def setting_text(value: object) -> str:
    """Return a value of a setting on one line of YAML, shortened."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    text = text.removesuffix("\n...\n").strip()
    limit = _MAX_TEXT_CHARACTERS
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@dataclass(frozen=True)
class SharedText:
    """What several texts have in common, once, and what each has of its own.

    Attributes:
        common: the text, where all have the same form: a letter in brackets stands for each place
            with different words. Else the sentences that all share.
        letters: the letters in `common`.
        words: for each text, by name, its words in these places.
        rest: for each text, by name, its other sentences; none where all have the same form.
    """

    common: str
    letters: tuple[str, ...] = ()
    words: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rest: tuple[tuple[str, str], ...] = ()


def shared_text(texts: Sequence[tuple[str, str]]) -> SharedText:
    """Return what texts have in common, and what each has of its own.

    Args:
        texts: (name, text), such as a variant and its privacy statement.
    """
    if len(texts) < 2:
        return SharedText("", rest=tuple(texts))
    found = _common_form([text.split() for _, text in texts])
    if found is not None:
        form, columns = found
        rows = zip(*columns, strict=True)
        words = [(name, row) for (name, _), row in zip(texts, rows, strict=False)]
        return SharedText(form, tuple(_LETTERS[: len(columns)]), tuple(words))
    split = [(name, _SENTENCE_END.split(text)) for name, text in texts]
    shared = [one for one in split[0][1] if all(one in own for _, own in split)]
    rest = [(name, " ".join(one for one in own if one not in shared)) for name, own in split]
    return SharedText(" ".join(shared), rest=tuple(rest))


def _common_form(
    texts: Sequence[Sequence[str]],
) -> tuple[str, list[tuple[str, ...]]] | None:
    """Return the common form of texts, with letters where their words differ, and those words.

    None where the numbers of words or too many words differ.
    """
    if len({len(words) for words in texts}) != 1:
        return None
    form: list[str] = []
    columns: list[tuple[str, ...]] = []
    for place in zip(*texts, strict=True):
        if len(set(place)) == 1:
            form.append(place[0])
            continue
        if len(columns) == len(_LETTERS):
            return None
        end = place[0][-1] if place[0][-1] in ".,;:" else ""
        end = end if all(one.endswith(end) for one in place) else ""
        form.append(f"[{_LETTERS[len(columns)]}]{end}")
        columns.append(tuple(one.removesuffix(end) for one in place))
    return " ".join(form), columns


SHARED_PARTS = {
    "data": "data (partitions, features, test set)",
    "initial_model": "initial model",
    "participants": "participants of every round",
}


def pair_digests(federation: "Federation") -> dict[str, str]:
    """Return a digest of each of `SHARED_PARTS`, that of data keyed, before the run."""
    data = federation.data
    examples = chain(data.clients, [data.test], data.held_out or ())
    state = federation.model.module.state_dict()
    schedule = federation.plan.participation
    rounds = range(1, federation.experiment.federation.rounds + 1)
    return {
        "data": private_digest(x for one in examples for x in (one.features, one.targets)),
        "initial_model": _digest(value.cpu().numpy() for value in state.values()),
        "participants": _digest(np.array(schedule.on_record(number)) for number in rounds),
    }


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class PairCheck:
    """The parts that variants share with the baseline, over all seeds.

    Attributes:
        differences: the differing parts, for each variant that has any.
        checked: number of compared pairs of runs.
    """

    differences: Mapping[str, tuple[str, ...]]
    checked: int

    @property
    def is_paired(self) -> bool:
        """Whether there are pairs and all of them share every part."""
        return self.checked > 0 and not self.differences

    @property
    def statement(self) -> str:
        """The result in words."""
        if not self.checked:
            return "No seed finished both in the baseline and in another variant."
        if self.is_paired:
            pairs = "the pair" if self.checked == 1 else f"all {self.checked} pairs"
            return (
                f"Checked in {pairs} of runs: with the same seed, every variant "
                f"shares {_listed(list(SHARED_PARTS.values()))} with the baseline."
            )
        found = "; ".join(
            f"{name} differs in its {_names(parts)}" for name, parts in self.differences.items()
        )
        return (
            f"Not everything is shared with the baseline: {found}. A part that a variant changes "
            "cannot be shared, and its difference to the baseline varies more between seeds."
        )

    def to_json(self) -> dict[str, object]:
        """Return `pairing` of `comparison.json`."""
        return {
            "paired": self.is_paired,
            "checked": self.checked,
            "differences": {name: list(parts) for name, parts in self.differences.items()},
            "statement": self.statement,
        }


def check_pairs(
    digests: Mapping[str, Mapping[int, Mapping[str, str]]], pairs: Iterable[tuple[str, str]]
) -> PairCheck:
    """Compare every variant's digests with those of its baseline for the same seed.

    Args:
        digests: `{variant: {seed: pair_digests(...)}}` of all finished runs.
        pairs: (variant, its baseline).
    """
    differences: dict[str, tuple[str, ...]] = {}
    checked = 0
    for name, baseline in pairs:
        seeds, reference = digests.get(name, {}), digests.get(baseline, {})
        shared = [seed for seed in seeds if seed in reference]
        checked += len(shared)
        parts = tuple(
            part
            for part in SHARED_PARTS
            if any(seeds[seed][part] != reference[seed][part] for seed in shared)
        )
        if parts:
            differences[name] = parts
    return PairCheck(differences, checked)


def _names(parts: Sequence[str]) -> str:
    return _listed([SHARED_PARTS[part] for part in parts])


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


Baseline = str | Mapping[str, str]
"""The baseline of all variants, or the baseline of each unit."""


@dataclass(frozen=True)
class UnitGroup:
    """The variants of one unit.

    Attributes:
        unit: `example` or `client`; None if no variant has privacy.
        baseline: name of the variant that the others of the unit are compared with.
        names: all variants of the unit, in the order of the file.
    """

    unit: str | None
    baseline: str
    names: tuple[str, ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs (variant, its baseline) to compare."""
        return tuple((name, self.baseline) for name in self.names if name != self.baseline)


def group_by_unit(units: Mapping[str, str | None], baseline: Baseline) -> tuple[UnitGroup, ...]:
    """Return the variants of each unit.

    A variant without privacy has no unit. Where there are two units, it belongs to those that it is
    the baseline of.

    Args:
        units: unit of each variant by name; None: without privacy.
        baseline: name of the baseline, or that of each unit.
    """
    found = tuple(dict.fromkeys(unit for unit in units.values() if unit is not None))
    if len(found) < 2:
        unit = found[0] if found else None
        return (UnitGroup(unit, _baseline_of(unit, baseline), tuple(units)),)
    return tuple(
        UnitGroup(
            unit,
            _baseline_of(unit, baseline),
            tuple(
                name
                for name, own in units.items()
                if own == unit or (own is None and name == _baseline_of(unit, baseline))
            ),
        )
        for unit in found
    )


def _baseline_of(unit: str | None, baseline: Baseline) -> str:
    if isinstance(baseline, str):
        return baseline
    return next(iter(baseline.values())) if unit is None else baseline[unit]


def unit_problems(units: Mapping[str, str | None], baseline: Baseline) -> Iterator[PathMessage]:
    """Yield why the variants of a comparison have no baseline within their unit.

    Args:
        units: as `group_by_unit`.
        baseline: as `group_by_unit`; its names exist.
    """
    found = list(dict.fromkeys(unit for unit in units.values() if unit is not None))
    named = {unit: baseline for unit in found} if isinstance(baseline, str) else dict(baseline)
    missing = [unit for unit in found if unit not in named]
    if missing:
        yield ("baseline",), f"names no variant for unit {missing[0]}; add {missing[0]}: NAME"
        return
    for unit, name in named.items():
        path: KeyPath = ("baseline",) if isinstance(baseline, str) else ("baseline", unit)
        own = units[name]
        if not isinstance(baseline, str) and unit not in found:
            yield path, f"no variant has unit {unit}; leave it out"
        elif own is not None and own != unit:
            yield (
                path,
                f"{name!r} has unit {own}, and an ε of unit {unit} cannot be compared with it: "
                f"write baseline: {{{own}: {name}, {unit}: NAME}}",
            )
    if len(found) > 1:
        for name, own in units.items():
            if own is None and name not in named.values():
                yield (
                    ("variants", name),
                    "has no privacy, hence no unit, and the comparison has two; name it as the "
                    "baseline of one, or leave it out",
                )
