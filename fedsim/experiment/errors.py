"""What is wrong with an experiment, and where: one line per problem."""

from collections.abc import Iterable
from dataclasses import dataclass

from fedsim.core.errors import InputError
from fedsim.experiment.text import KeyPath, path_text


@dataclass(frozen=True)
class Problem:
    """One mistake in an experiment.

    Attributes:
        source: the file as it was named, "command line" for an override, "" for a mapping.
        line: 1-based, None where the source has no lines.
        column: 1-based, None where the source has no lines.
        path: the keys that lead to it; empty for the file as a whole.
        message: what is wrong and, where it is known, the fix.
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
    """An experiment that cannot be run as written; `problems` holds every mistake found.

    `str()` is one line per problem, in the order of the file, overrides last.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(dict.fromkeys(problems), key=_position))
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    # Of a comparison there are two files, whose lines must not be mixed.
    return (problem.line is None, problem.source, problem.line or 0, problem.column or 0)
