"""Whatever is in files, plug-ins, runs and arguments: a message, no traceback, hang or silence.

`FEDSIM_FUZZ_CASES=1000` sets the number of cases, `FEDSIM_FUZZ_FIRST=17` that of the first one.
"""

import faulthandler
import io
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from operator import attrgetter
from pathlib import Path
from shutil import rmtree
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.cli import main
from fedsim.core.plugin_errors import original_functions, replaced_functions

CASES = int(os.environ.get("FEDSIM_FUZZ_CASES", "20"))
FIRST = int(os.environ.get("FEDSIM_FUZZ_FIRST", "0"))
PROCESSOR_SECONDS = 10.0  # of this process, for one case
WALL_SECONDS = 120  # only a case that waits for ever comes near
ZEROS = np.zeros  # a plug-in replaces it
KNOWN_CODES = (0, 1, 2, 3)
MAX_OUTPUT_CHARS = 60_000


class Stream(io.StringIO):
    """A text stream that keeps its text when a plug-in closes it."""

    said = ""

    def close(self) -> None:
        self.said += "" if self.closed else self.getvalue()
        super().close()

    def text(self) -> str:
        return self.said if self.closed else self.said + self.getvalue()


class HangError(BaseException):
    """A case that ran out of its time."""


@contextmanager
def time_limit() -> Iterator[list[str]]:
    """Interrupt a case after its processor or wall time; yield a list that then has a text."""
    hung: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        hung.append("".join(traceback.format_stack(frame)[-4:]))
        raise HangError

    former = {s: signal.signal(s, stop) for s in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    faulthandler.dump_traceback_later(3 * WALL_SECONDS, exit=True)  # deaf to signals
    try:
        yield hung
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in former.items():
            signal.signal(number, handler)


def faults_of(case: Any, directory: Path, codes: Counter[object]) -> Iterator[str]:
    """Run a case in its directory and yield what is wrong with how it ended."""
    out, err = Stream(), Stream()
    code: object = 0
    with time_limit() as hung, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = 0 if ended.code is None else ended.code
        except BaseException:  # noqa: BLE001
            err.said += traceback.format_exc()[-3000:]
    said, talk = out.text(), err.text()
    codes[code] += 1
    if hung:
        yield f"hung at {hung[0]}"
    if "Traceback (most recent call last)" in said + talk:
        yield f"traceback: {talk[-3000:]}"
    if code not in KNOWN_CODES:
        yield f"exit code {code!r}"
    if code != 0 and not talk.strip() and not err.closed:
        yield f"exit code {code} without a message"
    if code == 0 and not (said + talk).strip():
        yield "exit code 0 without output"
    if len(said) + len(talk) > MAX_OUTPUT_CHARS:
        yield f"{len(said) + len(talk)} characters of output"
    run = directory / "r"
    if code in (2, 3) and run.exists():
        yield f"exit code {code}, but a run directory was written"
    if run.exists() and not (run / "summary.json").is_file():
        yield "a run directory without a summary"
    if run.exists() and code == 1:
        status = json.loads((run / "summary.json").read_text())["status"]
        if status != "failed" and not talk.startswith("standard output: "):
            yield f"exit code 1 with status {status}"


@contextmanager
def own_torch() -> Iterator[None]:
    """Undo what a plug-in replaced, so that the next case starts as a process does."""
    limit = sys.getrecursionlimit()
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        np.zeros = ZEROS
        for name in replaced_functions():
            owner, _, attribute = name.rpartition(".")
            place = attrgetter(owner)(SimpleNamespace(torch=torch))
            setattr(place, attribute, original_functions()[name])


def run_cases(
    make_case: Callable[[int], Any],
    write: Callable[[Any, Path], None],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run CASES cases, each in a directory of its own, and fail with what was wrong."""
    original_functions()
    found: list[str] = []
    codes: Counter[object] = Counter()
    for number in range(FIRST, FIRST + CASES):
        case = make_case(number)
        directory = place / str(number)
        directory.mkdir()
        write(case, directory)
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "argv", ["fedsim", *case.arguments])
        with own_torch():
            faults = list(faults_of(case, directory, codes))
        found += [f"case {number} {str(case.arguments)[:200]}: {fault}" for fault in faults]
        rmtree(directory)
    sys.stdout.write(f"{CASES} cases from {FIRST}: exit codes {dict(codes)}, {len(found)} faults\n")
    assert not found, "\n\n".join(found[:20])


@pytest.mark.slow
def test_no_experiment_ends_in_a_traceback_a_hang_or_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: Callable[[str], ModuleType]
) -> None:
    cases = beside("fuzz_cases")
    run_cases(cases.make_case, lambda case, directory: case.write(directory), tmp_path, monkeypatch)


@pytest.mark.slow
def test_no_number_argument_or_damaged_run_ends_in_a_traceback_a_hang_or_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: Callable[[str], ModuleType]
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.setattr(sys, "argv", sys.argv)
    commands = beside("fuzz_commands").Commands(tmp_path / "base")
    run_cases(commands.make_case, commands.write, tmp_path, monkeypatch)
