"""JSON and YAML of files that anyone may have written: every mistake is one error with one line."""

import json
from typing import Any

import yaml


class FormatError(ValueError):
    """Text that is no JSON, or no YAML; the message has one line."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        FormatError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise FormatError("nested too deeply") from None
    except ValueError as error:
        raise FormatError(_first_line(error)) from error


def parse_plain_yaml(text: str) -> Any:
    """Return the value of a YAML text, which may be of another tool.

    Raises:
        FormatError: it is none, or nested too deeply.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise FormatError("nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date, a number
        raise FormatError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
