"""Changes of an experiment file as YAML lines."""

from collections.abc import Mapping
from typing import Any

import yaml


def yaml_lines(changes: Mapping[str, Any]) -> str:
    """Return the settings as YAML, one section a line where it fits; empty without changes.

    Args:
        changes: `{"key.path": value}`.
    """
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    if not tree:
        return ""
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, allow_unicode=True)
