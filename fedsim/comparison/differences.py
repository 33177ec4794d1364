"""Differences between variants: settings, privacy units, and the data and models of paired runs.

An ε that protects one example and an ε that protects all data of one client are different
guarantees. Variants with different privacy units are never ranked or subtracted.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
import yaml

from fedsim.core.formatting import shortened
from fedsim.experiment import Experiment
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.schema import flat_settings
from fedsim.runs.inputs import private_digest
from fedsim.server.participation.participation import Participation

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

_NOT_COMPARED = ("name", "seed")
_MAX_TEXT_CHARACTERS = 60
_LETTERS = "ABCDEFGH"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class SettingsTable:
    """The settings in which variants differ, `{variant: {key: value}}`, in the schema's order."""

    keys: tuple[str, ...] = ()
    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    # The text of a missing key is `–`, or `given` for a section that is null in another variant.
    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def among(self, names: Iterable[str]) -> "SettingsTable":
        """Return a table of only the variants in `names`, with the keys in which these differ."""
        values = {name: self.values[name] for name in names if name in self.values}
        keys = (key for key in self.keys if len({self.texts[name][key] for name in values}) > 1)
        return SettingsTable(tuple(keys), values, self.texts)


def compared_settings(experiment: Experiment) -> dict[str, object]:
    """Return an experiment's settings except name and seed; a list is a single value."""
    settings = flat_settings(experiment)
    return {key: value for key, value in settings.items() if key not in _NOT_COMPARED}


def settings_table(variants: Mapping[str, Mapping[str, object]]) -> SettingsTable:
    """Return the table of the settings (see `compared_settings`) in which variants differ.

    If a section such as `privacy` is null in one variant, the table has the key of the section.
    The keys within the section are compared among the other variants.
    """
    names = list(dict.fromkeys(key for settings in variants.values() for key in settings))
    tops = [key.partition(".")[0] for key in names]
    # A section before its keys, which another variant has.
    every = sorted(names, key=lambda key: (tops.index(key.partition(".")[0]), "." in key))
    keys = tuple(key for key in every if _differs(key, variants.values()))
    values, texts = dict[str, dict[str, object]](), dict[str, dict[str, str]]()
    for name, settings in variants.items():
        values[name] = {key: settings[key] for key in keys if key in settings}
        texts[name] = {key: _text(key, settings) for key in keys}
    return SettingsTable(keys, values, texts)


def _text(key: str, settings: Mapping[str, object]) -> str:
    if key in settings:
        return setting_text(settings[key])
    return "given" if any(other.startswith(f"{key}.") for other in settings) else "–"


def _differs(key: str, variants: Iterable[Mapping[str, object]]) -> bool:
    """Return whether variants differ in a key; where a section is null, its keys do not count."""
    parents = list(accumulate(key.split(".")[:-1], "{}.{}".format))
    forms = {
        repr(settings[key]) if key in settings else _text(key, settings)
        for settings in variants
        if not any(settings.get(parent, "") is None for parent in parents)
    }
    return len(forms) > 1


def setting_text(value: object) -> str:
    """Return a setting's value as one line of YAML, shortened if it is long."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    text = text.removesuffix("\n...\n").strip()
    return shortened(text, _MAX_TEXT_CHARACTERS)


@dataclass(frozen=True)
class SharedText:
    """The common part of several texts, and the parts in which the texts differ.

    Texts have the same form if they have equally many words and differ in few of them. The common
    part of such texts has letters in brackets, such as [a], where the words differ; `words` pairs
    each text's name with its words there. Of other texts, `common` has the sentences that all
    contain, and `rest` pairs each name with the other sentences.
    """

    common: str
    letters: tuple[str, ...] = ()
    words: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rest: tuple[tuple[str, str], ...] = ()


def shared_text(texts: Sequence[tuple[str, str]]) -> SharedText:
    """Return the common part of pairs (name, text), and the parts in which the texts differ."""
    if len(texts) < 2:
        return SharedText("", rest=tuple(texts))
    split = [text.split() for _, text in texts]
    differing = [i for i, place in enumerate(zip(*split, strict=False)) if len(set(place)) > 1]
    if len({len(words) for words in split}) == 1 and len(differing) <= len(_LETTERS):
        form = list(split[0])
        for letter, i in zip(_LETTERS, differing, strict=False):
            ends = {words[i][-1] for words in split}  # of a sentence or its part: not a difference
            end = ends.pop() if len(ends) == 1 and ends <= {*".,;:"} else ""
            for words in split:
                words[i] = words[i].removesuffix(end)
            form[i] = f"[{letter}]{end}"
        named = tuple(
            (name, tuple(words[i] for i in differing))
            for (name, _), words in zip(texts, split, strict=True)
            if differing
        )
        return SharedText(" ".join(form), tuple(_LETTERS[: len(differing)]), named)
    parts = [(name, _SENTENCE_END.split(text)) for name, text in texts]
    shared = [part for part in parts[0][1] if all(part in others for _, others in parts)]
    rest = [(name, " ".join(part for part in own if part not in shared)) for name, own in parts]
    return SharedText(" ".join(shared), rest=tuple(rest))


SHARED_PARTS = {
    "data": "data (partitions, features, test set)",
    "initial_model": "initial model",
    "participants": "participants of every round",
}


def pair_digests(federation: "Federation") -> dict[str, str]:
    """Return digests of the data (keyed), the initial model and the planned participants."""
    data = federation.data
    examples = chain(data.clients, [data.test], data.held_out or ())
    arrays = (array for part in examples for array in (part.features, part.targets))
    state = federation.model.module.state_dict()
    rounds = federation.experiment.federation.rounds
    return {
        "data": private_digest(arrays),
        "initial_model": _digest(value.cpu().numpy() for value in state.values()),
        "participants": participants_digest(federation.plan.participation, rounds),
    }


def participants_digest(schedule: Participation, rounds: int) -> str:
    """Return a digest of the planned participants of each round, as far as they are on record."""
    return _digest(np.array(schedule.on_record(number)) for number in range(1, rounds + 1))


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class PairCheck:
    """The result of the check that runs of one seed share data, initial model and participants."""

    differences: Mapping[str, tuple[str, ...]]  # names of digests, by variant that differs
    checked: int  # compared pairs of runs

    @property
    def is_paired(self) -> bool:
        """Whether runs were compared and all of them share data, initial model and participants."""
        return self.checked > 0 and not self.differences

    @property
    def statement(self) -> str:
        """The result of the check as a sentence."""
        if not self.checked:
            return "No seed finished both in the baseline and in another variant."
        if self.is_paired:
            pairs = "the pair" if self.checked == 1 else f"all {self.checked} pairs"
            return (
                f"Checked in {pairs} of runs: with the same seed, every variant "
                f"shares {_listed(SHARED_PARTS)} with the baseline."
            )
        differences = self.differences.items()
        listed = "; ".join(f"{name} differs in its {_listed(parts)}" for name, parts in differences)
        return (
            f"Not everything is shared with the baseline: {listed}. A part that a variant changes "
            "cannot be shared, and its difference to the baseline varies more between seeds."
        )

    def to_json(self) -> dict[str, object]:
        """Return the entry `pairing` of `comparison.json`."""
        return {
            "paired": self.is_paired,
            "checked": self.checked,
            "differences": {name: list(parts) for name, parts in self.differences.items()},
            "statement": self.statement,
        }


def check_pairs(
    digests: Mapping[str, Mapping[int, Mapping[str, str]]], pairs: Iterable[tuple[str, str]]
) -> PairCheck:
    """Return which digests differ between the runs of each variant and of its baseline.

    `digests` are `{variant: {seed: pair_digests(...)}}`; `pairs` are (variant, its baseline).
    """
    differences: dict[str, tuple[str, ...]] = {}
    checked = 0
    for name, baseline in pairs:
        seeds, reference = digests.get(name, {}), digests.get(baseline, {})
        shared = [(seeds[seed], reference[seed]) for seed in seeds if seed in reference]
        checked += len(shared)
        if parts := tuple(p for p in SHARED_PARTS if any(a[p] != b[p] for a, b in shared)):
            differences[name] = parts
    return PairCheck(differences, checked)


def _listed(parts: Iterable[str]) -> str:
    *words, last = (SHARED_PARTS[part] for part in parts)
    return f"{', '.join(words)} and {last}" if words else last


# The name of the baseline of all variants, or the name by privacy unit.
Baseline = str | Mapping[str, str]


@dataclass(frozen=True)
class UnitGroup:
    """A group of variants with the same privacy unit, in the order of the comparison file."""

    unit: str | None
    baseline: str
    names: tuple[str, ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs (name of a variant, name of the baseline) to compare."""
        return tuple((name, self.baseline) for name in self.names if name != self.baseline)


def group_by_unit(units: Mapping[str, str | None], baseline: Baseline) -> tuple[UnitGroup, ...]:
    """Return the variants grouped by privacy unit.

    A variant without privacy has no unit. If all other variants have the same unit, the variant is
    in their group. Otherwise there is a group for each unit, and a variant without privacy is only
    in a group whose baseline it is.
    """
    kinds = units_of(units)
    groups = []
    for unit in kinds or [None]:
        base = baseline if isinstance(baseline, str) else baseline[unit or next(iter(baseline))]
        names = (n for n, other in units.items() if len(kinds) < 2 or other == unit or n == base)
        groups.append(UnitGroup(unit, base, tuple(names)))
    return tuple(groups)


def units_of(units: Mapping[str, str | None]) -> list[str]:
    """Return the privacy units of the variants with privacy, each once."""
    return list(dict.fromkeys(unit for unit in units.values() if unit is not None))


def unit_problems(units: Mapping[str, str | None], baseline: Baseline) -> Iterator[PathMessage]:
    """Yield (key path, message) for each mistake in the choice of existing baselines."""
    kinds = units_of(units)
    named = dict.fromkeys(kinds, baseline) if isinstance(baseline, str) else dict(baseline)
    for unit in kinds:
        if unit not in named:
            yield ("baseline",), f"names no variant for unit {unit}; add {unit}: NAME"
            return
    for unit, name in named.items():
        path: KeyPath = ("baseline",) if isinstance(baseline, str) else ("baseline", unit)
        kind = units[name]
        if unit not in kinds:
            yield path, f"no variant has unit {unit}; leave it out"
        elif kind not in (None, unit):
            rule = f"{name!r} has unit {kind}, and an ε of unit {unit} cannot be compared with it"
            yield path, f"{rule}: write baseline: {{{kind}: {name}, {unit}: NAME}}"
    unnamed = [name for name, kind in units.items() if kind is None and name not in named.values()]
    for name in unnamed if len(kinds) > 1 else ():
        yield (
            ("variants", name),
            "has no privacy, hence no unit, and the comparison has two; name it as the baseline of "
            "one, or leave it out",
        )
