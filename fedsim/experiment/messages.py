"""Messages for pydantic's errors: one line per mistake, with the new name of a renamed key."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

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
from fedsim.experiment.schema import NAME_PATTERN, Experiment
from fedsim.experiment.shapes import (
    ErrorPlace,
    Model,
    NameOrMapping,
    NumberOrWord,
    Shape,
    TaggedUnion,
    child_shape,
    choices_of,
    field_purpose,
    keys_of,
    locate_error,
    sections_with_key,
)
from fedsim.secagg.settings import EncodingSettings

MOVED_KEYS = {
    **{
        f"secure_aggregation.{key}": f"secure_aggregation.encoding.{key}"
        for key in EncodingSettings.model_fields
    },
    "federation.strategy.lr": "federation.strategy.server_lr",
    "federation.server_averaging": "federation.ema_decay",
    "evaluation.every": "evaluation.every_rounds",
    "local.cohort": "local.vectorized_clients",
    "local.augment": "local.augmentations",
    "local.gradient.law": "local.gradient.distribution",
    "select.search.law": "select.search.distribution",
    "privacy.perturbation": "privacy.mechanism",
    "privacy.max_feature_norm": "privacy.mechanism.max_feature_norm",
    "privacy.max_target_norm": "privacy.mechanism.max_target_norm",
    "secure_aggregation.combine_timeout_s": "secure_aggregation.protocol.combine_timeout_s",
    "secure_aggregation.combine_retries": "secure_aggregation.protocol.combine_retries",
    "secure_aggregation.threshold": "secure_aggregation.protocol.threshold",
    "secure_aggregation.corrupt_fraction": "secure_aggregation.protocol.corrupt_fraction",
    "secure_aggregation.dropout_fraction": "secure_aggregation.protocol.dropout_fraction",
    "secure_aggregation.security_bits": "secure_aggregation.protocol.security_bits",
    "secure_aggregation.helper_key_fingerprints": "secure_aggregation.keys.helper_fingerprints",
    "secure_aggregation.helper_key_files": "secure_aggregation.keys.helper_files",
    "secure_aggregation.client_key_fingerprints": "secure_aggregation.keys.client_fingerprints",
    "secure_aggregation.client_key_files": "secure_aggregation.keys.client_files",
    "privacy.colluding_clients": "privacy.trust.colluding_clients",
    "privacy.fallback_epsilon": "privacy.trust.fallback_epsilon",
    "privacy.groups": "privacy.clipping.groups",
    "privacy.clip_rule": "privacy.clipping.rule",
    "privacy.noise_allocation": "privacy.clipping.noise_allocation",
    "privacy.clip_quantile": "privacy.clipping.quantile",
    "privacy.clip_learning_rate": "privacy.clipping.learning_rate",
    "privacy.clip_count_noise": "privacy.clipping.count_noise",
    "privacy.sampling_rate": "privacy.sampling.rate",
    "privacy.declared_examples": "privacy.adjacency.declared_examples",
    "privacy.orders": "privacy.accountant.orders",
}
"""The new dotted key of each renamed or moved key; removed keys are not listed."""


PathMessage = tuple[KeyPath, str]
"""A mistake in a file: the keys from the top level to the value, and what is wrong with it."""
Mistakes = Iterator[PathMessage]


def mistake(line: str) -> PathMessage:
    """Return (key path, message) of a line `key.path: message`, as a person reads it.

    Args:
        line: the line; its keys are names without dots, spaces or colons.
    """
    key, _, message = line.partition(": ")
    return tuple(key.split(".")), message


def messages_at(path: KeyPath, message: str | None) -> Mistakes:
    """Yield the pair (key path, message), unless the message is None.

    Args:
        path: the keys from the top level to the value.
        message: the message; None means that there is no mistake.
    """
    if message is not None:
        yield path, message


def too_many_clients(path: KeyPath, number: int | None, clients: int) -> Mistakes:
    """Yield (key path, message) if a key asks for more clients than there are."""
    if number is not None and number > clients:
        rule = f"must be <= data.partition.num_clients ({value_text(clients)})"
        yield path, f"{rule}, got {value_text(number)}"


def finite_messages(value: object, path: KeyPath) -> Mistakes:
    """Yield (key path, message) for every infinite number and every NaN inside a value."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value_text(value)}"
    children: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, item in children:
        yield from finite_messages(item, (*path, key))


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_NOT_A_NUMBER = {"literal_error", "float_type", "int_type", "int_from_float"}
_LIMITS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}
_PATTERNS = {
    NAME_PATTERN: "letters, digits, '.', '_' or '-', starting with a letter or a digit",
    "^[0-9a-f]{64}$": "64 digits of 0 to 9 and a to f",
}


def validation_messages(
    error: ValidationError, raw: object, model: Model = Experiment, prefix: KeyPath = ()
) -> list[PathMessage]:
    """Return (key path, message) for every mistake that an error of pydantic lists.

    Args:
        error: the error that `model.model_validate(raw)` raised.
        raw: the validated mapping.
        model: the settings class of the mapping.
        prefix: path of the mapping in the file.
    """
    builder = _MessageBuilder(error, raw, model, prefix)
    return list(dict.fromkeys(builder.messages()))


def args_messages(given: dict[str, Any], kind: Model, path: KeyPath) -> Mistakes:
    """Yield (key path, message) for every mistake in the arguments of a built-in component.

    Args:
        given: the arguments by name.
        kind: the settings class of the arguments.
        path: the keys from the top level to the arguments.
    """
    try:
        kind.model_validate(given)
    except ValidationError as error:
        yield from validation_messages(error, given, kind, path)


class _MessageBuilder:
    """Builder of messages from all errors of one validation, which may report one mistake twice."""

    def __init__(self, error: ValidationError, raw: object, model: Model, prefix: KeyPath) -> None:
        self._raw = raw
        self._model = model
        self._prefix = prefix
        errors = error.errors(include_url=False, include_input=False)
        self._unexplained = max(0, len(errors) - MAX_REPORTED)
        self._mistakes = [
            (details, locate_error(model, details["loc"])) for details in errors[:MAX_REPORTED]
        ]
        self._explained_paths: set[KeyPath] = set()  # missing keys that are misspelt or misplaced

    def messages(self) -> Mistakes:
        unknown = [
            message for mistake in self._mistakes for message in self._unknown_keys(*mistake)
        ]
        for path, message in unknown:
            yield (*self._prefix, *path), message
        for details, place in self._mistakes:
            if details["type"] != "extra_forbidden" and self._is_relevant(details, place):
                path, message = self._message(details, place)
                if path not in self._explained_paths:
                    yield (*self._prefix, *path), message
        if self._unexplained:
            yield self._prefix, f"{self._unexplained:,} more mistakes; fix the first ones"

    def _is_relevant(self, details: ErrorDetails, place: ErrorPlace) -> bool:
        """Return whether an error concerns the branch of a union that the file uses."""
        if isinstance(self._shape(place.path), NumberOrWord):
            as_word = isinstance(_get(self._raw, place.path), str)
            return as_word == (details["type"] == "literal_error")
        if place.union is None:
            return True
        return place.as_mapping == isinstance(_get(self._raw, place.union), dict)

    def _unknown_keys(self, details: ErrorDetails, place: ErrorPlace) -> Mistakes:
        """Yield errors of unknown keys, which pydantic omits in a union without its tag."""
        path = place.path
        if details["type"] == "extra_forbidden" and self._is_relevant(details, place):
            yield path, self._unknown_key_message(path, place.parent)
        elif details["type"] == "union_tag_not_found":
            shape = self._shape(path)
            for key in _mapping(_get(self._raw, path)):
                if key not in keys_of(shape):
                    yield (*path, key), self._unknown_key_message((*path, key), shape)

    def _unknown_key_message(self, path: KeyPath, parent: Shape) -> str:
        """Return the message for an unknown key; note the missing key that it misspells."""
        section, key = path[:-1], str(path[-1])
        if key == "<<":
            return "YAML 1.2 has no merge keys; write the keys out"
        moved = self._moved_key_message(path, parent)
        if moved:
            return moved
        present = _mapping(_get(self._raw, section))
        known = keys_of(parent)
        misplaced = None if is_synonym(key, known) else self._misplaced_key_message(section, key)
        if misplaced:
            return misplaced
        stem, colon, _ = key.partition(":")
        if colon and stem in known and present.get(key) is None:  # {rounds:5} is one long key
            self._explained_paths.add((*section, stem))
            return "unknown key; write a space after ':'"
        match = closest(key, known)
        if match is not None:
            self._explained_paths.add((*section, match))
            return f"unknown key; did you mean {match!r}?"
        return "unknown key"

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
            owners = [
                name
                for model in union.variants.values()
                if key in model.model_fields
                for name in choices_of(model, union.tag)
            ]
            chosen = value_text(_mapping(_get(self._raw, section)).get(union.tag))
            return f"unknown key for {union.tag} {chosen}; it belongs to {any_of(owners)}"
        homes = sections_with_key(self._model, key)
        homes = [home for home in homes if home[: len(section)] == section] or homes
        if len(homes) != 1:
            return None
        self._explained_paths.add((*homes[0], key))
        home = path_text((*self._prefix, *homes[0])) or "the top level"
        return f"unknown key here; it belongs to {home}"

    def _message(self, details: ErrorDetails, place: ErrorPlace) -> PathMessage:
        path, kind, context = place.path, details["type"], details.get("ctx", {})
        given = _get(self._raw, path)
        shape = self._shape(path)
        if kind == "missing":
            return path, f"missing; {field_purpose(keys_of(place.parent)[str(path[-1])])}"
        if isinstance(shape, TaggedUnion) and kind.startswith("union_tag"):
            if not isinstance(given, dict) and not shape.takes_name:
                return path, f"must be a mapping, got {value_text(given)}"
            return self._tag_message(path, shape)
        if isinstance(shape, TaggedUnion) and shape.takes_name and kind in _TYPES:
            rule = f"must be {any_of(shape.choices)}, or a mapping with {shape.tag}"
            return path, f"{rule}, got {value_text(given)}"
        if isinstance(shape, NumberOrWord) and kind in _NOT_A_NUMBER:
            rule = f"must be a number or {any_of(shape.words)}, got {value_text(given)}"
            return path, rule + did_you_mean(given, shape.words)
        if isinstance(shape, NameOrMapping) and self._is_neither(kind, given):
            *keys, last = keys_of(shape)
            words = "a string"
            if kind == "literal_error":
                words = any_of(re.findall(r"'([^']*)'", str(context["expected"])))
            keys = f"{', '.join(keys)} and {last}"
            return path, f"must be {words} or a mapping with {keys}, got {value_text(given)}"
        if kind == "literal_error":
            choices = re.findall(r"'([^']*)'", str(context["expected"]))
            return path, _choice(choices, given)
        if kind in _TYPES:
            return path, f"must be {_TYPES[kind]}, got {value_text(given)}"
        if kind in _LIMITS:
            name, sign = _LIMITS[kind]
            return path, f"must be {sign} {_number(context[name])}, got {value_text(given)}"
        return path, _general_message(details, given)

    def _is_neither(self, kind: str, given: object) -> bool:
        """Return whether a value is neither the word nor the mapping that the schema allows."""
        return kind != "value_error" and (kind != "literal_error" or not isinstance(given, str))

    def _tag_message(self, path: KeyPath, shape: TaggedUnion) -> PathMessage:
        written, choices = _get(self._raw, path), shape.choices
        section = shape.mapping(written)
        tag_path = (*path, shape.tag) if isinstance(written, dict) else path
        if shape.tag not in section:
            return tag_path, f"missing; {any_of(choices)}"
        return tag_path, _choice(choices, section[shape.tag], shape.known)

    def _shape(self, path: KeyPath) -> Shape:
        """Return the shape of the value at a path, in the union variant that the file selects."""
        shape: Shape = self._model
        value = self._raw
        for part in path:
            if isinstance(shape, TaggedUnion):
                shape = shape.variant(shape.mapping(value).get(shape.tag))
            elif isinstance(shape, NameOrMapping):
                shape = shape.mapping
            shape = child_shape(shape, str(part))
            value = _get(value, (part,))
        return shape


def _choice(choices: Sequence[str], given: object, known: Sequence[str] = ()) -> str:
    rule = any_of(choices) if len(choices) < 3 else f"one of {any_of(choices)}"
    hint = did_you_mean(given, [*choices, *known])
    return f"must be {rule}, got {value_text(given)}{hint}"


def _general_message(details: ErrorDetails, given: object) -> str:
    """Return the message of an error that does not depend on its location."""
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":  # a rule of the settings, whose message is complete
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        form = _PATTERNS.get(str(context["pattern"]), "in the right form")
        return f"must be {form}, got {value_text(given)}"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if kind == "too_short":
        count = context["min_length"]
        noun = "item" if count == 1 else "items"
        return f"must have at least {count} {noun}, got {value_text(given)}"
    rule = details["msg"].replace("Input should be", "must be").replace("Value error, ", "")
    return f"{rule}, got {value_text(given)}"


def _number(limit: object) -> str:
    whole = isinstance(limit, float) and limit.is_integer() and abs(limit) < 1e15
    return str(int(limit)) if whole and isinstance(limit, float) else str(limit)


def _get(value: object, path: KeyPath) -> object:
    for part in path:
        if isinstance(value, list):
            value = value[part] if isinstance(part, int) and part < len(value) else None
        else:
            value = _mapping(value).get(str(part))
    return value


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
