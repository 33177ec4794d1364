"""A run killed at any moment continues exactly, and its ledger shows every release.

A death leaves what is on disk, and the disk changes only by operations on files. So the moments
that matter are listed, not guessed: before and after every operation, and in the middle of every
write. `SnapshotTaker` copies the run directory at each; real kills strike at each named place.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.files import LinesFile
from fedsim.runs.runner import run_experiment
from fedsim.server.train_round import TrainRound

RANDOM_KILLS = 100
EXPERIMENT: dict[str, Any] = {
    "name": "crash",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "mlp", "args": {"hidden": [40]}},
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
SAME = (
    "model.safetensors",
    "privacy.json",
    "clients.csv",
    "ledger.jsonl",
    "releases.jsonl",
    "experiment.yaml",
)


class SnapshotTaker:
    """Copies the run directory before and after every operation on its files.

    Attributes:
        snapshots: for each moment the files of the run directory by name, oldest first; the same
            content twice in a row is one moment.
    """

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.snapshots: list[dict[str, bytes]] = []
        self._run = run
        for owner, name in ((os, "fsync"), (os, "replace"), (Path, "open"), (Path, "touch")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def look(self) -> None:
        """Take a snapshot if the disk has changed since the last one."""
        now = {}
        for folder, _, names in os.walk(self._run):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:  # not the wrapped Path.open
                    now[os.path.relpath(file.name, self._run)] = file.read()
        if not self.snapshots or now != self.snapshots[-1]:
            self.snapshots.append(now)

    def _wrapped(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.look()
            result = function(*arguments, **options)
            self.look()
            return result

        return call


def torn_writes(before: dict[str, bytes], after: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Yield `after` with half of each file's new bytes: a write that a death cut short.

    A file that is renamed appears whole, and so does the run directory.
    """
    for name, content in after.items():
        old, renamed = before.get(name, b""), content in before.values()
        if before and not renamed and content.startswith(old) and len(content) > len(old) + 1:
            yield after | {name: content[: (len(old) + len(content)) // 2]}


@pytest.mark.parametrize(
    "every", [pytest.param(7, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
def test_after_a_death_at_any_operation_on_files_the_run_ends_the_same(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All places: each charge, row, checkpoint and result, before, within and after its write.

    The slow stage visits a seventh of them. Rounds are alike, with 6 places and 4 torn writes:
    seven shares no factor with ten, so that over the rounds each of them is visited.
    """
    whole = tmp_path / "whole"
    with monkeypatch.context() as patch:
        taker = SnapshotTaker(whole, patch)
        fedsim.run(EXPERIMENT, out=whole)
    states = list(taker.snapshots)
    for before, after in zip(taker.snapshots, taker.snapshots[1:], strict=False):
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        visible = {name for name in changed if not name.endswith(".tmp")}
        if before:  # the directory itself appears whole
            assert len(visible) <= 1, f"an operation between two snapshots was missed: {changed}"
        states.extend(torn_writes(before, after))
    unfinished = 0
    for number, state in enumerate(states[::every]):
        run = tmp_path / f"run-{number}"
        for name, content in state.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(content)
        begun = (run / "experiment.yaml").exists()
        assert begun or not state
        if begun:
            assert_every_release_is_in_the_ledger(run)
            unfinished += "summary.json" not in state
        run_experiment(EXPERIMENT, out=run, resume=begun)
        assert_same_result(whole, run)
        shutil.rmtree(run)
    assert unfinished >= 6 * 8 // every, "a charge, a row and a checkpoint in each of six rounds"


# Imports are done once; each line from stdin is a run in a forked process. What the parent has run
# before is nothing but imports, accounts and the page of a report, whose fonts and templates take
# longer to load than the run: a fork of torch at work would not be a process that users have. Where
# only rounds matter, the page is an empty file: most random kills would strike while it is drawn.
NURSERY = """
import gc, importlib, json, os, signal, sys
from pathlib import Path
import sklearn.datasets, torch
import fedsim, fedsim.report.run, fedsim.report.html, fedsim.report.plots
import fedsim.runs.verification
torch.set_num_threads(1)
experiment = json.load(open("experiment.json"))
print("ready", flush=True)
write_report = fedsim.report.html.write_report
if sys.argv[1] == "blank":
    def write_report(directory): (directory.path / "report.html").touch()
    fedsim.report.run.write_report = write_report

def die_at(place, when, call):
    module, name = place.split(":")
    owner, calls = importlib.import_module(module), 0
    *outer, name = name.split(".")
    for attribute in outer: owner = getattr(owner, attribute)
    function = getattr(owner, name)
    def dying(*arguments, **options):
        nonlocal calls
        calls += 1
        if (calls, when) == (call, "before"): os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if calls == call: os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, dying)

warm = False
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        os.close(0)
        if order["death"]: die_at(*order["death"])
        fedsim.run(experiment, out=order["out"], resume=order["resume"])
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    if not warm:
        run = fedsim.runs.directory.RunDirectory(Path(order["out"]))
        write_report(run)
        fedsim.runs.verification.verify_run(run)
        gc.freeze()
        warm = True
"""


class Nursery:
    """Starts runs in processes that are ready at once, with a page of their own or a blank one."""

    def __init__(self, directory: Path, *, page: str) -> None:
        (directory / "experiment.json").write_text(json.dumps(EXPERIMENT))
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, page],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(
        self,
        out: str,
        *,
        death: tuple[str, str, int] | None = None,
        kill_after: float | None = None,
    ) -> int:
        """Run or resume to the end or to the kill; return the exit code.

        Args:
            out: name of the run directory.
            death: the function at which the process kills itself, whether before or after the call,
                and the number of that call.
            kill_after: seconds after which the process is killed, if it has not ended.
        """
        if self._process.stdin is None:
            raise RuntimeError("the nursery has no input")
        order = {"out": out, "resume": self.has_begun(out), "death": death}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        child = int(self._answer())
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):  # it had ended before
                os.kill(child, signal.SIGKILL)
        return int(self._answer())

    def has_begun(self, out: str) -> bool:
        return (self._directory / out / "experiment.yaml").exists()

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


def place(function: Any) -> str:
    """Return a function as the nursery finds it; a rename is noticed here by the type checker."""
    return f"{function.__module__}:{function.__qualname__}"


RENAME = "os:replace"
CHARGE = place(FileJournal.append_all)
AGGREGATE = place(TrainRound.finish)
LINE = place(LinesFile.append)  # of releases.jsonl, then of rounds.jsonl
CHECKPOINT = place(RunDirectory.write_checkpoint)
MODEL = place(RunDirectory.write_model)
CLIENTS = place(RunDirectory.write_clients)
PAGE = "fedsim.report.run:write_report"
DEATHS: dict[str, tuple[str, str, int]] = {
    "before the run directory has its name": (RENAME, "before", 4),
    "when the run directory has its name": (RENAME, "after", 4),
    "before the first charge": (CHARGE, "before", 1),
    "after a charge and before training": (CHARGE, "after", 2),
    "before replies are aggregated": (AGGREGATE, "before", 3),
    "after aggregation": (AGGREGATE, "after", 4),
    "before the releases of a round": (LINE, "before", 3),
    "before the row of a round": (LINE, "before", 4),
    "between the row and the checkpoint": (LINE, "after", 6),
    "after a checkpoint": (CHECKPOINT, "after", 5),
    "before the model": (MODEL, "before", 1),
    "between privacy.json and clients.csv": (CLIENTS, "before", 1),
    "between clients.csv and summary.json": (CLIENTS, "after", 1),
    "before the page": (PAGE, "before", 1),
}


@pytest.mark.long  # the slow stage kills at most of these places, one after another
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_at_each_place_that_matters_and_resumed_equals_uninterrupted(
    tmp_path: Path, nursery: Nursery
) -> None:
    assert nursery.run("whole") == 0
    for number, (name, death) in enumerate(DEATHS.items()):
        out = f"run-{number}"
        assert nursery.run(out, death=death) == -signal.SIGKILL, name
        assert nursery.has_begun(out) == (number > 0)
        if number:
            assert_every_release_is_in_the_ledger(tmp_path / out)
        assert nursery.run(out) == 0
        assert_same_result(tmp_path / "whole", tmp_path / out)


@pytest.mark.slow  # real processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("nursery", ["own"], indirect=True)
def test_killed_again_and_again_it_still_ends_the_same(tmp_path: Path, nursery: Nursery) -> None:
    assert nursery.run("whole") == 0
    for death in [
        (CHARGE, "after", 1),
        (CHARGE, "after", 1),
        (AGGREGATE, "after", 1),
        (LINE, "after", 2),
        (LINE, "after", 4),
        (CHECKPOINT, "after", 2),
        (LINE, "before", 2),
        (CLIENTS, "before", 1),
        (CLIENTS, "after", 1),
        (PAGE, "before", 1),
    ]:
        assert nursery.run("r", death=death) == -signal.SIGKILL
        assert_every_release_is_in_the_ledger(tmp_path / "r")
    assert nursery.run("r") == 0
    assert_same_result(tmp_path / "whole", tmp_path / "r")
    assert (tmp_path / "r" / "report.html").stat().st_size > 5000


@pytest.mark.long  # random moments find what nobody listed; listed ones are in the other stages
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_at_a_hundred_random_moments_and_resumed_equals_uninterrupted(
    tmp_path: Path, nursery: Nursery
) -> None:
    assert nursery.run("whole") == 0
    started = time.perf_counter()
    assert nursery.run("again") == 0
    seconds = time.perf_counter() - started
    moments, killed, unfinished = random.Random(11), 0, 0
    for number in range(RANDOM_KILLS):
        out = f"run-{number}"
        code = nursery.run(out, kill_after=moments.uniform(0.0, seconds))
        killed += code == -signal.SIGKILL
        if nursery.has_begun(out):
            assert_every_release_is_in_the_ledger(tmp_path / out)
            unfinished += not (tmp_path / out / "report.html").exists()
        assert nursery.run(out) == 0
        assert_same_result(tmp_path / "whole", tmp_path / out)
    assert killed > RANDOM_KILLS / 4
    assert unfinished > RANDOM_KILLS / 10  # many in the middle, not before the first or last round


def assert_every_release_is_in_the_ledger(run: Path) -> None:
    """Each participant of a finished round, and of the checkpointed model, was charged for it."""
    directory, journal = RunDirectory(run), FileJournal(run / "ledger.jsonl")
    charged = {
        (charge.client, charge.round_number)
        for client in journal.clients()
        for charge in journal.history(client)
    }
    rows = RunFiles(directory).rounds
    released = {(client, row["round"]) for row in rows for client in row["participants"]}
    assert released <= charged
    checkpoint = directory.read_checkpoint()
    assert (0 if checkpoint is None else checkpoint.state.round_number) <= len(rows)


def assert_same_result(whole: Path, run: Path) -> None:
    for name in SAME:
        assert (whole / name).read_bytes() == (run / name).read_bytes(), (run, name)
    rows = [
        [{**row, "seconds": 0, "timeline": {}} for row in RunFiles(RunDirectory(path)).rounds]
        for path in (whole, run)
    ]
    assert rows[0] == rows[1]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("completed", 6)


def test_the_experiment_has_what_can_go_wrong(tmp_path: Path) -> None:
    """Cohorts, a withdrawal, a shortened round and failures have to survive the kills."""
    plan = assemble(load_experiment(EXPERIMENT), ledger=None).blocks.plan
    assert max(len(block) for block in plan.blocks(1)) == 3
    result = run_experiment(EXPERIMENT, out=tmp_path / "r")
    assert any(row["withdrawn"] for row in result.rounds)
    assert any(row["shortened"] for row in result.rounds)
    assert any(row["failed"] for row in result.rounds)
