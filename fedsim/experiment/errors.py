"""Errors of an experiment: one line for each problem, with its place in the file."""

from collections.abc import Iterable
from dataclasses import dataclass

from fedsim.core.errors import InputError
from fedsim.core.limits import MAX_REPORTED
from fedsim.experiment.text import KeyPath, path_text


@dataclass(frozen=True)
class Problem:
    """One mistake in an experiment.

    Attributes:
        source: path of the file as given, "command line" for an override, "" for a mapping.
        line: line number from 1; None where the source has no lines.
        column: column number from 1; None where the source has no lines.
        path: the keys from the top level to the mistake; empty for the file as a whole.
        message: the mistake and, where it is known, the fix.
    """

    source: str
    line: int | None
    column: int | None
    path: KeyPath
    message: str

    def __str__(self) -> str:
        position = f":{self.line}:{self.column}" if self.line is not None else ""
        place = f"{self.source}{position}"
        return ": ".join(part for part in (place, path_text(self.path), self.message) if part)


class ExperimentError(InputError):
    """An experiment with mistakes; `problems` holds all of them.

    `str()` has one line for each problem, in the order of the file, overrides last. Of more than
    `MAX_REPORTED` it has the first ones and the number of the others.
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
        """Return what a notebook shows in place of a traceback: mistakes of a file have none."""
        return [f"{type(self).__name__}:", *str(self).splitlines()]


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    # A comparison has two files; the lines of each stay together.
    return (problem.line is None, problem.source, problem.line or 0, problem.column or 0)
