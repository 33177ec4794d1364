"""Runs a page of the documents: its files are written, its commands run, their output compared.

A fenced block whose first line is a comment with a file's name, such as `# first.yaml`, is that
file. A `console` block is commands, each after `$ `, and what they print on standard output (of
a command that fails: on standard error, too). A line `...` stands for any lines. `$ echo $?` shows
the exit code of the command before; every other command must end with 0.

Tolerances: a time may be any, in any unit, and so may a place in a file and the root of a run,
which covers its times. An accuracy may differ by 0.6 percentage points, the recall of a class by 6
(it has few examples; which classes have the lowest may differ, too), a loss by 2 % and a number
between commas by 1e-9, since other processors add numbers in another order. Everything else is
exact.

Commands of `fedsim`, the runs of a comparison and scripts of Python run in this process.
The page of a run is an empty file, except that of `fedsim report`: no document shows what is in it,
and drawing it takes longer than many of the runs.

With WRITE_DOCS=1 in the environment, output that is not cut by `...` is written into the page
where it differs. Read the difference before committing it.
"""

import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest

from fedsim.cli import main
from fedsim.comparison.jobs import Job
from fedsim.report import run as report_of_runs
from fedsim.report.progress import PhaseDisplay
from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import list_again

ROOT = Path(__file__).parent.parent.parent
ACCURACY, RECALL, LOSS, DIGITS = 0.6, 6.0, 0.02, 1e-9
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"\b\d+(?:\.\d+)? ?(?:µs|ms|s|min|h)\b(?: \d+ (?:s|min)\b)?")
_LOWEST = re.compile(r"^recall by class, lowest  .*$", re.MULTILINE)
_ROOT = re.compile(r"^root: [0-9a-f]{64}$", re.MULTILINE)
_PLACE = re.compile(r"\bbyte \d+\b")
_FILE = re.compile(r"^# (\S+\.(?:yaml|py|csv|toml|diff))\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A command, and what the page says that it prints."""

    command: str
    output: str


def blocks_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield language and text of every fenced block."""
    for found in _FENCE.finditer(page.read_text(encoding="utf-8")):
        yield found[1], found[2]


def commands_of(block: str) -> Iterator[Shown]:
    """Yield the commands of a console block; what stands before the first is not one."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Shown(command, output)


def differs(shown: str, printed: str) -> str | None:
    """Return how a page differs from what was printed, or None where it does not."""
    first, *rest = (_words(part) for part in re.split(r"^ *\.\.\.$", shown, flags=re.MULTILINE))
    actual = _words(printed)
    if not _same(first, actual[: len(first)]):
        return f"the page shows\n{shown}\nand this was printed:\n{printed}"
    if not rest and len(first) != len(actual):
        return f"more was printed than the page shows:\n{printed}"
    place = len(first)
    for number, chunk in enumerate(rest, start=1):
        last = len(actual) - len(chunk)
        starts = range(place, last + 1) if number < len(rest) else range(max(place, last), last + 1)
        found = next((at for at in starts if _same(chunk, actual[at : at + len(chunk)])), None)
        if found is None:
            return f"the page shows\n{' '.join(chunk)}\nand this was printed:\n{printed}"
        place = found + len(chunk)
    return None


def _words(text: str) -> list[str]:
    text = _LOWEST.sub("recall by class, lowest <recalls>", text)
    text = _PLACE.sub("byte <place>", text)
    return _ROOT.sub("root: <root>", _TIME.sub("<time>", text)).split()


def _same(shown: list[str], printed: list[str]) -> bool:
    return len(shown) == len(printed) and all(
        _alike(one, other, before)
        for one, other, before in zip(shown, printed, ["", *shown], strict=False)
    )


def _alike(shown: str, printed: str, before: str) -> bool:
    if shown == printed:
        return True
    cells = [shown.split(","), printed.split(",")]
    if len(cells[0]) == len(cells[1]) > 2:  # a row of a table
        return all(map(_same_cell, *cells))
    one, other = _number(shown), _number(printed)
    if one is None or other is None:
        return False
    if shown.rstrip(",;)").endswith("%") and printed.rstrip(",;)").endswith("%"):
        return abs(one - other) <= (RECALL if before.endswith(":") else ACCURACY)
    return before.endswith("loss") and math.isclose(one, other, rel_tol=LOSS)


def _same_cell(shown: str, printed: str) -> bool:
    one, other = _number(shown), _number(printed)
    if one is None or other is None:
        return shown == printed
    return math.isclose(one, other, rel_tol=DIGITS)


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip(",;)").rstrip("%"))
    except ValueError:
        return None


@dataclass
class Terminal:
    """Runs commands in one directory: `fedsim` and scripts in this process, all else in a shell."""

    directory: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    code: int = 0

    def __call__(self, command: str) -> str:
        """Return what the command prints; its exit code is in `code`."""
        if command == "echo $?":
            return f"{self.code}\n"
        first, *arguments = shlex.split(command)
        if first == "python" and len(arguments) == 1:
            printed, errors = self._script(arguments[0])
        elif first == "fedsim" and arguments[-2:-1] == [">"]:
            printed, errors = self._fedsim(arguments[:-2])
            (self.directory / arguments[-1]).write_text(printed, encoding="utf-8")
            printed = ""
        elif first == "fedsim":
            printed, errors = self._fedsim(arguments)
        else:
            printed, errors = self._shell(command)
        return printed + (errors if self.code else "")

    def _fedsim(self, arguments: list[str]) -> tuple[str, str]:
        self.monkeypatch.setattr(sys, "argv", ["fedsim", *arguments])
        self.capsys.readouterr()
        self.code = 0
        try:
            main()
        except SystemExit as end:
            self.code = end.code if isinstance(end.code, int) else 1
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def _script(self, name: str) -> tuple[str, str]:
        """Run a script that ends well as a new interpreter would: without its old modules."""
        self.monkeypatch.setattr(sys, "argv", [name])
        self.monkeypatch.syspath_prepend(str(self.directory))
        self.capsys.readouterr()
        self.code = 0
        runpy.run_path(name, run_name="__main__")
        for module, loaded in list(sys.modules.items()):
            names = vars(loaded)  # torch.classes has any attribute that is asked for
            paths = [names.get("__file__"), *(names.get("__path__") or ())]
            if any(str(path).startswith(str(self.directory)) for path in paths):
                del sys.modules[module]
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def _shell(self, command: str) -> tuple[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        self.code = done.returncode
        return done.stdout, done.stderr


RunPage = Callable[[str], None]


@pytest.fixture
def terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    jobs_here: None,
) -> Terminal:
    """A terminal of 80 columns in an empty directory, with `experiments/` beside it.

    No phase is so long that it gets a line: how long it takes depends on the machine.
    """
    monkeypatch.setattr(PhaseDisplay.__init__, "__kwdefaults__", {"patience": 3600.0})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    return Terminal(tmp_path, capsys, monkeypatch)


def _write_empty_page(directory: RunDirectory) -> None:
    directory.write_text("report.html", "")
    list_again(directory, "report.html")


@pytest.fixture
def run_page(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> RunPage:
    """Return a function that runs a page from its first line to its last."""
    message = Job.to_message
    monkeypatch.setattr(report_of_runs, "write_report", _write_empty_page)
    monkeypatch.setattr(Job, "to_message", lambda job: {**message(job), "report": False})

    def run(name: str) -> None:
        page = ROOT / name
        wrong, commands = [], 0
        for language, text in blocks_of(page):
            header = _FILE.match(text)
            if header is not None and language != "console":
                path = terminal.directory / header[1]
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if language != "console":
                continue
            new, shown = text, list(commands_of(text))
            assert shown, f"{name}: a console block without a command:\n{text}"
            for one, following in zip(shown, [*shown[1:], None], strict=True):
                printed = terminal(one.command)
                commands += 1
                asked = following is not None and following.command == "echo $?"
                if terminal.code != 0 and one.command != "echo $?" and not asked:
                    wrong.append(f"$ {one.command}\nended with {terminal.code}:\n{printed}")
                elif (found := differs(one.output, printed)) is not None:
                    wrong.append(f"$ {one.command}\n{found}")
                    new = new.replace(_as_shown(one), _as_printed(one, printed), 1)
            _write(page, text, new)
        assert commands
        assert not wrong, f"{name}:\n" + "\n\n".join(wrong)

    return run


def _as_shown(shown: Shown) -> str:
    return f"$ {shown.command}\n{shown.output}"


def _as_printed(shown: Shown, printed: str) -> str:
    if re.search(r"^ *\.\.\.$", shown.output, re.MULTILINE):
        return _as_shown(shown)  # what to leave out is for people to say
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return "\n".join([f"$ {shown.command}", *lines, ""])


def _write(page: Path, old: str, new: str) -> None:
    if os.environ.get("WRITE_DOCS") == "1":
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(old, new, 1), encoding="utf-8")


def rows_of(page: Path, first: str) -> list[list[str]]:
    """Return the cells of the table with this first heading, row by row, the headings first."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [[one.strip(" `") for one in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return [cells[0], *cells[2:]]


@pytest.fixture(name="rows_of")
def _rows_of() -> Callable[[Path, str], list[list[str]]]:
    return rows_of


@pytest.fixture(name="differs")
def _differs() -> Callable[[str, str], str | None]:
    return differs


@pytest.fixture(name="blocks_of")
def _blocks_of() -> Callable[[Path], Iterator[tuple[str, str]]]:
    return blocks_of
