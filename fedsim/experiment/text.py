"""Text of paths, values and choices in messages."""

import difflib
import math
import re
from collections.abc import Container, Iterable, Sequence

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
    """Return `a.b.0`; a key that could be misread or would break the line is quoted, a long cut."""
    parts = (str(part) for part in path)
    return ".".join(shorten(part if _PLAIN_KEY.fullmatch(part) else repr(part)) for part in parts)


def shorten(text: str) -> str:
    """Return the text, cut in the middle if it is longer than `_MAX_VALUE_CHARS`."""
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    half = (_MAX_VALUE_CHARS - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def value_text(value: object) -> str:
    """Return a value as in YAML, or the kind of a collection."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, int) and abs(value) >= 10**_MAX_VALUE_CHARS:
        return "a huge number"  # str() refuses integers of thousands of digits
    return shorten(repr(value))


def any_of(choices: Sequence[str]) -> str:
    """Return `'a'`, `'a' or 'b'`, `'a', 'b' or 'c'`."""
    quoted = [repr(choice) for choice in choices]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that the word most likely misspells; None if none is close."""
    by_form: dict[str, str] = {}
    for option in options:
        by_form.setdefault(_form(option), option)
    form = _form(word[:_MAX_VALUE_CHARS])
    if is_synonym(word, by_form):
        return by_form[_SYNONYMS[form]]
    for option, name in by_form.items():
        if sorted(option) == sorted(form):  # swapped letters
            return name
    matches = difflib.get_close_matches(form, by_form, n=1, cutoff=0.6)
    return by_form[matches[0]] if matches else None


def is_synonym(word: str, options: Container[str]) -> bool:
    """Whether a word is another name of an option."""
    return _SYNONYMS.get(_form(word), "") in options


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or an empty string if no option is close."""
    match = closest(word, options) if isinstance(word, str) else None
    return f"; did you mean {match!r}?" if match else ""


def _form(word: str) -> str:
    return word.casefold().replace("-", "_")
