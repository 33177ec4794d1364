"""JSON and YAML of files that anyone may have written: every mistake is one error with one line."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import yaml

_Text = TypeVar("_Text")


class FormatError(ValueError):
    """Text that is no JSON, or no YAML; the message has one line."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        FormatError: it is none, or nested too deeply.
    """
    return _parse(json.loads, text)


def parse_plain_yaml(text: str) -> Any:
    """Return the value of a YAML text, which may be of another tool.

    Raises:
        FormatError: it is none, or nested too deeply.
    """
    return _parse(yaml.safe_load, text)


def _parse(parse: Callable[[_Text], Any], text: _Text) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise FormatError("nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date, a number
        message = next(iter(str(error).splitlines()), type(error).__name__)
        raise FormatError(message) from error
