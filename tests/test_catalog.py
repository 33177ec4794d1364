"""`fedsim list` names everything that an experiment file takes."""

from typing import Any

import pytest

from fedsim.catalog import KEYS, catalog
from fedsim.experiment import json_schema

# Their keys take references of plug-ins, too, or mappings.
OPEN = {"datasets", "models", "features", "losses", "metrics", "strategies", "trackers"}


def choices(key: str) -> set[str]:
    """Return the names that a key takes, from the JSON Schema; those of all forms of a union."""
    schema: Any = json_schema()
    forms = [schema]
    for part in key.removesuffix("[]").replace("[]", "").split("."):
        forms = [
            below
            for form in forms
            if part in form.get("properties", {})
            for below in flat(form["properties"][part], schema)
        ]
    named = [form for form in forms if form.get("type") == "string"]
    return {name for form in named for name in form.get("enum", [form.get("const")])} - {None}


def flat(form: Any, schema: Any) -> list[Any]:
    """Return a schema without references, unions and lists: each of its forms."""
    if "$ref" in form:
        return flat(schema["$defs"][form["$ref"].rpartition("/")[2]], schema)
    inner = [*form.get("anyOf", []), *form.get("oneOf", []), *form.get("allOf", [])]
    inner += [form["items"]] if "items" in form else []
    return [one for each in inner for one in flat(each, schema)] or [form]


@pytest.mark.parametrize("kind", [kind for kind in KEYS if kind not in OPEN])
def test_list_is_complete(kind: str) -> None:
    assert choices(KEYS[kind]) == catalog()[kind].keys()


def test_every_kind_has_its_key() -> None:
    assert KEYS.keys() == catalog().keys() >= OPEN
