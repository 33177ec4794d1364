"""Errors of an experiment file: one line with file, line and column for each mistake."""

import json
import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from fedsim.core.errors import InputError
from fedsim.core.limits import MAX_REPORTED
from fedsim.core.names import closest_name

KeyPath = tuple[str | int, ...]

_MAX_VALUE_CHARS = 60
_PLAIN_KEY = re.compile(r"[\w-]+")

# Names of other tools, and the name in fedsim.
_SYNONYMS = {
    "clip_norm": "max_grad_norm",
    "l2_norm_clip": "max_grad_norm",
    "learning_rate": "lr",
    "sigma": "noise_multiplier",
}


def path_text(path: KeyPath) -> str:
    """Return a key path as `a.b.0`; special keys are quoted, and long keys are shortened."""
    parts = (str(part) for part in path)
    return ".".join(shorten(part if _PLAIN_KEY.fullmatch(part) else repr(part)) for part in parts)


def shorten(text: str) -> str:
    """Return the text, shortened in the middle if it is longer than `_MAX_VALUE_CHARS`."""
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    half = (_MAX_VALUE_CHARS - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def value_text(value: object) -> str:
    """Return a scalar as YAML text, or "a list" or "a mapping" for a value that contains others."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, int) and abs(value) >= 10**_MAX_VALUE_CHARS:
        return "a huge number"  # str() refuses integers of thousands of digits
    return shorten(repr(value))


def any_of(choices: Sequence[str]) -> str:
    """Return the choices as a phrase: `'a'`, `'a' or 'b'`, `'a', 'b' or 'c'`."""
    quoted = [repr(choice) for choice in choices]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that `word` most likely misspells, or None if no option is close."""
    by_form = {_form(option): option for option in reversed([*options])}  # the first one counts
    form = _form(word[:_MAX_VALUE_CHARS])
    if is_synonym(word, by_form):
        return by_form[_SYNONYMS[form]]
    for option, name in by_form.items():
        if sorted(option) == sorted(form):  # swapped letters
            return name
    match = closest_name(form, by_form)
    return None if match is None else by_form[match]


def is_synonym(word: str, options: Container[str]) -> bool:
    """Return whether `word` is another known name, such as `learning_rate`, of an option."""
    return _SYNONYMS.get(_form(word), "") in options


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or an empty string if no option is close."""
    match = closest(word, options) if isinstance(word, str) else None
    return f"; did you mean {match!r}?" if match else ""


def _form(word: str) -> str:
    return word.casefold().replace("-", "_")


@dataclass(frozen=True)
class Problem:
    """One mistake in an experiment, with its place in the file."""

    source: str  # path of the file as given; "command line"; "" for a mapping
    line: int | None  # from 1; None if the source has no lines
    column: int | None
    path: KeyPath  # empty for a mistake of the whole file
    message: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"
        return ": ".join(part for part in (place, path_text(self.path), self.message) if part)


Problems = list[Problem]
"""The mistakes that were found so far; functions append those that they find."""


class ExperimentError(InputError):
    """Error of an experiment file; its `problems` are all mistakes in the file.

    `str()` has one line for each problem, in the order of the file, with overrides last. A longer
    list is cut after `MAX_REPORTED` problems, and the last line counts the others.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(dict.fromkeys(problems), key=_position))
        super().__init__(self.problems)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[: MAX_REPORTED + 1]]
        if len(self.problems) > len(lines):
            lines[-1] = f"and {len(self.problems) - MAX_REPORTED:,} more mistakes"
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the problems, without a traceback."""
        return [f"{type(self).__name__}:", *str(self).splitlines()]


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    # A comparison has two files; the lines of each stay together.
    return (problem.line is None, problem.source, problem.line or 0, problem.column or 0)
