"""A study: one publication, its settings, and the function that measures its results again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal

from experiments.reproductions import studies
from experiments.reproductions.rows import Row
from fedsim.core.errors import InputError

Size = Literal["reduced", "full"]


class StudyError(InputError):
    """A study cannot be measured as asked; the message names the fix."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a study is measured.

    Attributes:
        size: `full` has the published sizes; `reduced` shows the same in a minute or so.
        seeds: the seeds of the runs.
        out: directory of the runs. Finished runs in it are used again.
        data: directory of the user's files.
        workers: processes for runs; None: one for each processor.
    """

    size: Size
    seeds: Sequence[int]
    out: Path
    data: Path
    workers: int | None = None


@dataclass(frozen=True, kw_only=True)
class NeededFile:
    """A file that the user brings.

    Attributes:
        path: below the directory of `--data`; `*` stands for any text.
        origin: where the file comes from.
    """

    path: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """A publication whose results are measured again.

    Attributes:
        title: the publication's claim, in a few words.
        source: paper, and table or figure.
        settings: the settings that are as published, with the lines of the authors' code that say
            so, and those that are not, with the reason.
        measure: returns the rows of a setup.
        seeds: number of seeds of each size.
        files: files that the user brings; none: nothing is needed.
        remark: why results differ, in a few words for the page.
    """

    title: str
    source: str
    settings: str
    measure: Callable[[Setup], list[Row]]
    seeds: dict[Size, int]
    files: tuple[NeededFile, ...] = ()
    remark: str = ""

    def missing_files(self, data: Path) -> list[NeededFile]:
        """Return the files that are not below the directory."""
        return [one for one in self.files if not any(data.glob(one.path))]


def find_studies() -> dict[str, Study]:
    """Return the studies of all modules in `studies/`, by name."""
    found: dict[str, Study] = {}
    for module in sorted(iter_modules(studies.__path__), key=lambda one: one.name):
        found |= import_module(f"{studies.__name__}.{module.name}").STUDIES
    return found
