"""A new user: an empty directory, files that they write, commands that they type.

The ways of 26 November 2026, before the first hour was mended (commit d192cb4d), and of the day
after. Seconds are processor time of one thread, on one busy machine:

| journey            | before                               | after                                |
|--------------------|--------------------------------------|--------------------------------------|
| table of patients  | 19 commands, 15 edits, 58 s: a mis-  | 6 commands, 1 edit, 15 s: 77.7 %     |
|                    | take at a time, then 56.5 % where    |                                      |
|                    | the majority is 55.4 %               |                                      |
| diverging baseline | 1 command, 13 s: "+25.9 pp" for      | 2 commands, 26 s: the offered one    |
|                    | privacy, and no way out named        | tunes the baseline, -3.1 pp          |
| notebook           | 2 commands, 3 edits for files of     | 2 commands, no file, 12 s: tables    |
|                    | data, model and experiment, 17 s: no | and figures                          |
|                    | table of a comparison, no figure     |                                      |
| script of Opacus   | 4 commands, 26 s, by two diffs that  | 4 commands, 21 s: the page shows the |
|                    | no page showed                       | diffs                                |
"""

import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedsim.cli import main

ROOT = Path(__file__).parent.parent.parent
TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1"}
_FILES = re.compile(r"^```\w+\n(# (\S+)\n.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Journey:
    """The way of one user from an empty directory to the last artefact.

    Attributes:
        home: the directory of the user, empty at first.
        steps: every command with the seconds it took.
    """

    home: Path
    steps: list[tuple[str, float]] = field(default_factory=list)

    def write(self, name: str, text: str) -> Path:
        """Write a file as the user does in an editor."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def write_page(self, page: str) -> None:
        """Write the files that a page of the documents shows."""
        for shown in _FILES.finditer((ROOT / page).read_text()):
            self.write(shown[2], shown[1])

    def type(self, command: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command line; `fedsim` runs in this process, which has imported torch.

        Args:
            command: as the user types it, without a shell's features.
            code: the expected exit code.
        """
        program, *arguments = shlex.split(command)
        began = time.perf_counter()
        done = self._fedsim(arguments) if program == "fedsim" else self._other(program, arguments)
        self.steps.append((command, time.perf_counter() - began))
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
        return done

    def _fedsim(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.home)
            patch.setattr(sys, "argv", ["fedsim", *arguments])
            for name, value in TERMINAL.items():
                patch.setenv(name, value)
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(bool(end.code))
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def _other(self, program: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        real = {
            "git": ["git"],
            "python": [sys.executable],
            "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        }[program]
        return subprocess.run(
            [*real, *arguments],
            cwd=self.home,
            env={**os.environ, **TERMINAL},
            capture_output=True,
            text=True,
        )

    def table(self) -> str:
        """Return the commands with their seconds, and the sum."""
        lines = [f"{seconds:7.1f} s  {command}" for command, seconds in self.steps]
        return "\n".join([*lines, f"{sum(seconds for _, seconds in self.steps):7.1f} s  in all"])


@pytest.fixture
def journey(tmp_path: Path, jobs_here: None) -> Iterator[Journey]:
    """A user in an empty directory; the time of each step is printed (`pytest -rP` shows it)."""
    way = Journey(tmp_path)
    yield way
    print(way.table())  # noqa: T201  what this test is for, beside its checks
