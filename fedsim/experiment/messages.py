"""Messages for pydantic's errors: one line per mistake, with the new name of a renamed key."""

import re
from collections.abc import Iterator, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedsim.core.formatting import count_text
from fedsim.core.limits import MAX_REPORTED
from fedsim.experiment.errors import (
    KeyPath,
    any_of,
    closest,
    did_you_mean,
    is_synonym,
    path_text,
    value_text,
)
from fedsim.experiment.schema import NAME_PATTERN
from fedsim.experiment.shapes import (
    Model,
    NameOrMapping,
    NumberOrWord,
    Shape,
    TaggedUnion,
    child_shape,
    chosen_shape,
    field_purpose,
    keys_of,
    sections_with_key,
)

MOVED_KEYS = {
    "federation.strategy.lr": "federation.strategy.server_lr",
    "federation.server_averaging": "federation.ema_decay",
    "evaluation.every": "evaluation.every_rounds",
    "local.cohort": "local.vectorized_clients",
    "local.augment": "local.augmentations",
    "local.gradient.law": "local.gradient.distribution",
    "select.search.law": "select.search.distribution",
    "privacy.perturbation": "privacy.mechanism",
    "secure_aggregation.helper_key_fingerprints": "secure_aggregation.keys.helper_fingerprints",
    "secure_aggregation.helper_key_files": "secure_aggregation.keys.helper_files",
    "secure_aggregation.client_key_fingerprints": "secure_aggregation.keys.client_fingerprints",
    "secure_aggregation.client_key_files": "secure_aggregation.keys.client_files",
    "privacy.clip_rule": "privacy.clipping.rule",
    "privacy.clip_quantile": "privacy.clipping.quantile",
    "privacy.clip_learning_rate": "privacy.clipping.learning_rate",
    "privacy.clip_count_noise": "privacy.clipping.count_noise",
    "privacy.sampling_rate": "privacy.sampling.rate",
}
"""The new dotted key of each renamed key; one that kept its name is found in its new section."""

PathMessage = tuple[KeyPath, str]
"""A mistake in a file: the keys from the top level to the value, and what is wrong with it."""
Mistakes = Iterator[PathMessage]

_TYPES = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
}
_NOT_A_NUMBER = {"literal_error", "float_type", "int_type", "int_from_float"}
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}  # by the name in pydantic's errors
_PATTERNS = {
    NAME_PATTERN: "letters, digits, '.', '_' or '-', starting with a letter or a digit",
    "^[0-9a-f]{64}$": "64 digits of 0 to 9 and a to f",
}


def validation_messages(
    error: ValidationError, raw: object, model: Model, prefix: KeyPath = ()
) -> list[PathMessage]:
    """Return (key path, message) for every mistake that an error of pydantic lists.

    The error is of `model.model_validate(raw)`; `prefix` is the path of this mapping in the file.
    """
    messages = _MessageBuilder(raw, model, prefix).messages(error)
    return [((*prefix, *path), message) for path, message in dict.fromkeys(messages)]


class _MessageBuilder:
    """Builder of messages from all errors of one validation, which may report one mistake twice."""

    def __init__(self, raw: object, model: Model, prefix: KeyPath) -> None:
        self._raw = raw
        self._model = model
        self._prefix = prefix
        self._explained_paths: set[KeyPath] = set()  # missing keys that are misspelt or misplaced

    def messages(self, error: ValidationError) -> Mistakes:
        errors = error.errors(include_url=False, include_input=False)
        placed = [(each, self._path(each)) for each in errors[:MAX_REPORTED]]
        relevant = [(details, path) for details, path in placed if path is not None]
        for details, path in relevant:
            yield from self._unknown_keys(details, path)
        known = [self._message(*each) for each in relevant if each[0]["type"] != "extra_forbidden"]
        yield from (message for message in known if message[0] not in self._explained_paths)
        if len(errors) > MAX_REPORTED:
            yield (), f"{len(errors) - MAX_REPORTED:,} more mistakes; fix the first ones"

    def _path(self, details: ErrorDetails) -> KeyPath | None:
        """Return the place of an error in the file; None if the file uses another union branch."""
        path: KeyPath = ()
        shape: Shape = self._model
        for part in details["loc"]:
            if isinstance(shape, TaggedUnion):
                shape = shape.variants.get(str(part))
            elif isinstance(shape, NumberOrWord):
                if isinstance(_get(self._raw, path), str) != (details["type"] == "literal_error"):
                    return None
            elif isinstance(shape, NameOrMapping):
                # A class with a validator is named function-after[_rule(), TheClass].
                branch = str(part).rstrip("]").rpartition(" ")[2]
                as_mapping = branch == shape.mapping.__name__
                if as_mapping != isinstance(_get(self._raw, path), dict):
                    return None
                shape = shape.mapping if as_mapping else None
            else:
                path, shape = (*path, part), child_shape(shape, str(part))
        return path

    def _unknown_keys(self, details: ErrorDetails, path: KeyPath) -> Mistakes:
        """Yield errors of unknown keys, which pydantic omits in a union without its tag."""
        if details["type"] == "extra_forbidden":
            yield path, self._unknown_key_message(path, self._parent(path))
        elif details["type"] == "union_tag_not_found":
            shape = self._shape(path)
            for key in _mapping(_get(self._raw, path)):
                if key not in keys_of(shape):
                    yield (*path, key), self._unknown_key_message((*path, key), shape)

    def _unknown_key_message(self, path: KeyPath, parent: Shape) -> str:
        """Return the message for an unknown key; note the missing key that it misspells."""
        section, key, known = path[:-1], str(path[-1]), keys_of(parent)
        if key == "<<":
            return "YAML 1.2 has no merge keys; write the keys out"
        if message := self._moved_key_message(path, parent):
            return message
        if not is_synonym(key, known) and (message := self._misplaced_key_message(section, key)):
            return message
        stem, colon, _ = key.partition(":")
        if colon and stem in known and _get(self._raw, path) is None:  # {rounds:5} is one long key
            self._explained_paths.add((*section, stem))
            return "unknown key; write a space after ':'"
        if (match := closest(key, known)) is None:
            return "unknown key"
        self._explained_paths.add((*section, match))
        return f"unknown key; did you mean {match!r}?"

    def _moved_key_message(self, path: KeyPath, parent: Shape) -> str | None:
        """Return the message for a key of `MOVED_KEYS`; None for any other key."""
        section = (*self._prefix, *path[:-1])
        new = MOVED_KEYS.get(".".join(map(str, (*section, path[-1]))))
        if new is None:
            return None
        *home, name = new.split(".")
        if tuple(home) == section and name not in keys_of(parent):
            return None  # the section has neither key for the name that it was given
        self._explained_paths.add((*home, name)[len(self._prefix) :])
        return f"moved; write {new}"

    def _misplaced_key_message(self, section: KeyPath, key: str) -> str | None:
        """Return the message for a key that belongs to another section; None for any other key."""
        union = self._shape(section)
        if isinstance(union, TaggedUnion) and key in keys_of(union):
            chosen = value_text(_get(self._raw, (*section, union.tag)))
            owners = any_of(union.choices_with(key))
            return f"unknown key for {union.tag} {chosen}; it belongs to {owners}"
        homes = [*sections_with_key(self._model, key)]
        homes = [home for home in homes if home[: len(section)] == section] or homes
        if len(homes) != 1:
            return None
        self._explained_paths.add((*homes[0], key))
        home = path_text((*self._prefix, *homes[0])) or "the top level"
        return f"unknown key here; it belongs to {home}"

    def _message(self, details: ErrorDetails, path: KeyPath) -> PathMessage:
        kind, context = details["type"], details.get("ctx", {})
        given, shape = _get(self._raw, path), self._shape(path)
        if kind == "missing":
            return path, f"missing; {field_purpose(keys_of(self._parent(path))[str(path[-1])])}"
        if kind == "value_error":  # the settings gave a complete message
            return path, str(context["error"])
        if kind == "string_too_long":
            return path, f"must have at most {context['max_length']} characters"
        rule, words = _rule(details, shape, given)
        if isinstance(shape, TaggedUnion) and kind.startswith("union_tag"):
            section = shape.mapping(given)
            path = (*path, shape.tag) if isinstance(given, dict) else path
            if shape.tag in section:
                given, words = section[shape.tag], [*shape.choices, *shape.known]
                rule = _one_of(shape.choices)
            elif isinstance(given, dict):
                return path, f"missing; {any_of(shape.choices)}"
        return path, f"{rule}, got {value_text(given)}{did_you_mean(given, words)}"

    def _shape(self, path: KeyPath) -> Shape:
        """Return the shape of the value at a path, in the union variant that the file selects."""
        return child_shape(self._parent(path), str(path[-1])) if path else self._model

    def _parent(self, path: KeyPath) -> Shape:
        """Return the shape of the mapping that has, or lacks, the last key of a path."""
        return chosen_shape(self._shape(path[:-1]), _get(self._raw, path[:-1]))


def _rule(details: ErrorDetails, shape: Shape, given: object) -> tuple[str, Sequence[str]]:
    """Return the rule that a value breaks, and the words of which it may misspell one."""
    kind, context, words = details["type"], details.get("ctx", {}), list[str]()
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", str(context["expected"]))
    if isinstance(shape, TaggedUnion) and kind.startswith("union_tag"):
        return "must be a mapping", ()
    if isinstance(shape, TaggedUnion) and shape.takes_name and kind in _TYPES:
        return f"must be {any_of(shape.choices)}, or a mapping with {shape.tag}", ()
    if isinstance(shape, NumberOrWord) and kind in _NOT_A_NUMBER:
        return f"must be a number or {any_of(shape.words)}", shape.words
    if isinstance(shape, NameOrMapping) and not (words and isinstance(given, str)):
        *keys, last = keys_of(shape)
        name = any_of(words) or "a string"
        return f"must be {name} or a mapping with {', '.join(keys)} and {last}", ()
    if words:
        return _one_of(words), words
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}", ()
    if kind == "string_pattern_mismatch":
        return f"must be {_PATTERNS.get(str(context['pattern']), 'in the right form')}", ()
    if kind == "too_short":
        return f"must have at least {count_text(context['min_length'], 'item')}", ()
    for name, sign in _LIMITS.items():
        if name in context:
            return f"must be {sign} {str(context[name]).removesuffix('.0')}", ()
    return details["msg"].replace("Input should be", "must be"), ()


def _one_of(choices: Sequence[str]) -> str:
    return f"must be {any_of(choices)}" if len(choices) < 3 else f"must be one of {any_of(choices)}"


def _get(value: object, path: KeyPath) -> object:
    for part in path:
        if isinstance(value, list):
            value = value[part] if isinstance(part, int) and part < len(value) else None
        else:
            value = _mapping(value).get(str(part))
    return value


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
