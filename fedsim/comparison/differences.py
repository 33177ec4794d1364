"""Settings in which variants differ, and the sentences that their statements share."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from fedsim.experiment import Experiment
from fedsim.experiment.dump import flat_settings

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
