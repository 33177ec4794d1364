"""A run killed at any moment continues exactly, and its ledger shows all that was released."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment

MOMENTS = 100
EXPERIMENT: dict[str, Any] = {
    "name": "crash",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 6, "clients_per_round": 3},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {
        "noise_multiplier": 1.0,
        "target_epsilon": 9.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "clipping": "adaptive",
        "on_exhausted": "withdraw",
        "clients": {"1": {"target_epsilon": 0.9}},
    },
    "faults": [{"kind": "dropout_after", "clients": [2], "rounds": [2, 4]}],
}
SAME = ("model.safetensors", "privacy.json", "clients.csv", "ledger.jsonl", "experiment.yaml")

# Imports are done once; each line from stdin is a run in a forked process. What the parent has run
# before is nothing but imports and the page of a report, whose fonts and templates take longer to
# load than the run: a fork of torch at work would not be a process that users have. Where only
# rounds matter, the page is an empty file: most kills would strike while its plots are drawn.
NURSERY = """
import gc, json, os, sys
from pathlib import Path
import sklearn.datasets, torch
import fedsim, fedsim.api, fedsim.report.html, fedsim.report.plots
torch.set_num_threads(1)
experiment = json.load(open("experiment.json"))
print("ready", flush=True)
write_report = fedsim.report.html.write_report
if sys.argv[1] == "blank":
    def write_report(directory): (directory.path / "report.html").touch()
    fedsim.api.write_report = write_report
warm = False
for line in sys.stdin:
    out, resume = line.split()
    child = os.fork()
    if child == 0:
        os.close(0)
        run_experiment(experiment, out=out, resume=resume == "resume")
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    if not warm:
        write_report(fedsim.runs.directory.RunDirectory(Path(out)))
        gc.freeze()
        warm = True
"""


class Nursery:
    """Starts runs in processes that are ready at once, with a page of their own or a blank one."""

    def __init__(self, directory: Path, *, page: str) -> None:
        (directory / "experiment.json").write_text(json.dumps(EXPERIMENT))
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, page],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, out: str, *, resume: bool, kill_after: float | None = None) -> int:
        """Run to the end or to the kill; return the exit code, −9 where the kill came in time."""
        if self._process.stdin is None:
            raise RuntimeError("the nursery has no input")
        self._process.stdin.write(f"{out} {'resume' if resume else 'new'}\n")
        self._process.stdin.flush()
        child = int(self._answer())
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):  # it had ended before
                os.kill(child, signal.SIGKILL)
        return int(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("the nursery has no output")
        return self._process.stdout.readline().strip()


@pytest.fixture
def nursery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    started = Nursery(tmp_path, page=getattr(request, "param", "blank"))
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_at_a_hundred_moments_and_resumed_equals_uninterrupted(
    tmp_path: Path, nursery: Nursery
) -> None:
    assert nursery.run("whole", resume=False) == 0
    started = time.perf_counter()
    assert nursery.run("again", resume=False) == 0
    seconds = time.perf_counter() - started
    moments, killed, unfinished = random.Random(11), 0, 0
    for number in range(MOMENTS):
        out = f"run-{number}"
        code = _killed(nursery, out, moments.uniform(0.0, seconds))
        killed += code == -signal.SIGKILL
        begun = (tmp_path / out / "experiment.yaml").exists()
        if begun:
            _assert_all_that_was_released_is_in_the_ledger(tmp_path / out)
            unfinished += not (tmp_path / out / "report.html").exists()
        assert nursery.run(out, resume=begun) == 0
        _assert_same(tmp_path / "whole", tmp_path / out)
    assert killed > MOMENTS / 4
    assert unfinished > MOMENTS / 10  # many in the middle, not before the first or after the last


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("nursery", ["own"], indirect=True)
def test_killed_again_and_again_it_still_ends_the_same(tmp_path: Path, nursery: Nursery) -> None:
    assert nursery.run("whole", resume=False) == 0
    started = time.perf_counter()
    assert nursery.run("again", resume=False) == 0
    seconds = time.perf_counter() - started
    moments, begun = random.Random(12), False
    for _ in range(10):
        begun = (tmp_path / "r" / "experiment.yaml").exists()
        code = _killed(nursery, "r", moments.uniform(0.3, 0.9) * seconds, resume=begun)
        assert code in (0, -signal.SIGKILL)
    assert nursery.run("r", resume=(tmp_path / "r" / "experiment.yaml").exists()) == 0
    _assert_same(tmp_path / "whole", tmp_path / "r")


def _killed(nursery: Nursery, out: str, after: float, *, resume: bool = False) -> int:
    return nursery.run(out, resume=resume, kill_after=after)


def _assert_all_that_was_released_is_in_the_ledger(run: Path) -> None:
    """Whoever is in a finished round, or in the checkpointed model, was charged for that round."""
    directory, journal = RunDirectory(run), FileJournal(run / "ledger.jsonl")
    charged = {
        (charge.client, charge.round_number)
        for client in journal.clients()
        for charge in journal.history(client)
    }
    rows = directory.read_rounds()
    released = {(client, row["round"]) for row in rows for client in row["participants"]}
    assert released <= charged
    checkpoint = directory.read_checkpoint()
    assert (0 if checkpoint is None else checkpoint.round_number) <= len(rows)


def _assert_same(whole: Path, run: Path) -> None:
    for name in SAME:
        assert (whole / name).read_bytes() == (run / name).read_bytes(), (run, name)
    rows = [
        [{**row, "seconds": 0, "timeline": {}} for row in RunDirectory(path).read_rounds()]
        for path in (whole, run)
    ]
    assert rows[0] == rows[1]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("completed", 6)


def test_the_experiment_has_what_can_go_wrong(tmp_path: Path) -> None:
    """A withdrawal, a shortened round and failures are among what has to survive the kills."""
    result = run_experiment(EXPERIMENT, out=tmp_path / "r")
    assert any(row["withdrawn"] for row in result.rounds)
    assert any(row["shortened"] for row in result.rounds)
    assert any(row["failed"] for row in result.rounds)
