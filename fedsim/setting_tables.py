"""Tables of the keys of a settings class: key, values, default, meaning, example."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fedsim.core.settings import Settings

Schema = dict[str, Any]

_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
    "array": "list",
}
_BOUNDS = (
    ("exclusiveMinimum", "> {}"),
    ("minimum", "≥ {}"),
    ("exclusiveMaximum", "< {}"),
    ("maximum", "≤ {}"),
    ("maxLength", "at most {} characters"),
    ("pattern", "`{}`"),
)


@dataclass(frozen=True)
class SettingRow:
    """The description of one key of a settings class, as a row of a table.

    Attributes:
        key: path of the key, such as `privacy.clients.NAME.delta`; `[]` is an element of a list.
        values: type and range of the value.
        default: the default as YAML, or "required" for a key without default.
        meaning: description of the key.
        only_with: the values of another key, such as `scheme: dirichlet`, with which this key is
            allowed; empty if it is always allowed.
        example: a value as YAML, from choices and default; empty if these give no example.
        schema: JSON Schema of the value, with the definitions that the schema refers to.
    """

    key: str
    values: str
    default: str
    meaning: str
    only_with: tuple[str, ...] = ()
    example: str = ""
    schema: Schema = field(default_factory=dict, compare=False, repr=False)


def rows_of(settings: type[Settings], path: str = "") -> list[SettingRow]:
    """Return a row for each key of a settings class, including the keys of its sections.

    Args:
        settings: the settings class.
        path: prefix of all keys; empty for the settings of a whole file.
    """
    schema = settings.model_json_schema()
    return list(_properties(schema, schema.get("$defs", {}), path))


def _properties(schema: Schema, definitions: Schema, path: str) -> Iterator[SettingRow]:
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        key = f"{path}.{name}" if path else name
        yield SettingRow(
            key=key,
            values=_values(inner, definitions),
            default="required" if name in required else _default(inner),
            meaning=inner.get("description") or _which(inner),
            example=_example(_resolved(inner, definitions)),
            schema={**inner, "$defs": definitions},
        )
        yield from _inside(inner, definitions, key)


def _which(schema: Schema) -> str:
    chosen = schema.get("discriminator", {}).get("propertyName")
    return "" if chosen is None else f"`{chosen}` selects the kind"


def _inside(schema: Schema, definitions: Schema, key: str) -> Iterator[SettingRow]:
    """Yield the keys below a key: those of its section, sections to choose, list or mapping."""
    schema = _resolved(schema, definitions)
    if "discriminator" in schema:
        yield from _choices(schema, definitions, key)
        return
    for option in schema.get("anyOf", ()):
        yield from _inside(option, definitions, key)
    if "items" in schema:
        yield from _inside(schema["items"], definitions, f"{key}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _inside(schema["additionalProperties"], definitions, f"{key}.NAME")
    yield from _properties(schema, definitions, key)


def _choices(schema: Schema, definitions: Schema, key: str) -> Iterator[SettingRow]:
    """Yield the keys of alternative sections; equal keys are merged."""
    name = schema["discriminator"]["propertyName"]
    sections = [_resolved(option, definitions) for option in schema["oneOf"]]
    choices_by_row: dict[SettingRow, list[str]] = {}
    every = 0
    for section in sections:
        values = section["properties"][name]
        known = values.get("enum", [values.get("const")])
        chosen = values.get("examples", known)  # some of many, or forms of endless ones
        every += len(chosen)
        for row in _properties(section, definitions, key):
            is_name = row.key == f"{key}.{name}"
            same = replace(row, values="", example="") if is_name else row
            named = known if is_name and known != [None] else chosen
            choices_by_row.setdefault(same, []).extend(f"{name}: {value}" for value in named)
    for row, choices in choices_by_row.items():
        if row.key == f"{key}.{name}":
            values = [choice.split(": ")[1] for choice in choices]
            text = " or ".join(f"`{value}`" for value in values)
            yield replace(row, values=text, example=values[-1], schema={"enum": values})
        else:
            yield row if len(choices) == every else replace(row, only_with=tuple(choices))


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    return definitions[schema["$ref"].rsplit("/", 1)[1]]


def _values(schema: Schema, definitions: Schema) -> str:
    schema = _resolved(schema, definitions)
    parts = schema.get("anyOf") or schema.get("oneOf")
    if parts:
        return " or ".join(dict.fromkeys(_values(part, definitions) for part in parts))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = _TYPES.get(schema.get("type", ""), "any")
    if kind == "list":
        kind = f"list of: {_values(schema['items'], definitions)}"
    bounds = [text.format(_number(schema[key])) for key, text in _BOUNDS if key in schema]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def _example(schema: Schema) -> str:
    """Return a value other than the default if the type has few values, else the default."""
    default = schema.get("default")
    if schema.get("type") == "boolean":
        return "false" if default else "true"
    parts = schema.get("anyOf", [schema])
    choices = [value for part in parts for value in part.get("enum", [part.get("const")])]
    choices = [value for value in choices if value is not None]
    if choices:
        return str(next((value for value in reversed(choices) if value != default), choices[0]))
    if isinstance(default, str):
        return default
    return json.dumps(default) if isinstance(default, int | float | list) and default != [] else ""


def _number(value: object) -> str:
    return "2^63" if value == 2**63 else str(value)


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return "required"
    value = schema["default"]
    if isinstance(value, dict) and value.get("name") in schema.get("anyOf", [{}])[0].get(
        "enum", ()
    ):
        return f"`{value['name']}`"  # a name alone is enough
    if isinstance(value, dict) and value:
        return "its own defaults"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"
