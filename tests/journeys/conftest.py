"""A new user: an empty directory, files that they write, commands that they type."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
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
        """Run a command line; `fedsim` and `python` are those of the tests.

        Args:
            command: as the user types it, without a shell's features.
            code: the expected exit code.
        """
        program, *arguments = shlex.split(command)
        real = {
            "fedsim": [sys.executable, "-m", "fedsim"],
            "git": ["git"],
            "python": [sys.executable],
            "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        }[program]
        began = time.perf_counter()
        done = subprocess.run(
            [*real, *arguments],
            cwd=self.home,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
        )
        self.steps.append((command, time.perf_counter() - began))
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{command}\n{done.stderr}"
        return done

    def table(self) -> str:
        """Return the commands with their seconds, and the sum."""
        lines = [f"{seconds:7.1f} s  {command}" for command, seconds in self.steps]
        return "\n".join([*lines, f"{sum(seconds for _, seconds in self.steps):7.1f} s  in all"])


@pytest.fixture
def journey(tmp_path: Path) -> Iterator[Journey]:
    """A user in an empty directory; the time of each step is printed (`pytest -rP` shows it)."""
    one = Journey(tmp_path)
    yield one
    print(one.table())  # noqa: T201  what this test is for, beside its checks
