"""Kills runs at operations on files, by a count: `python tests/attacks/kills.py 100 DIRECTORY`.

A third argument is the seed of the trials, a fourth `distributed`: then a helper opens sums, and
clients drop out down to `min_clients` and below. No round may have two sums, in all processes
together.

A run changes the disk by writes, fsyncs, renames and removals. They are counted in one whole run;
each trial then picks one of them by a seeded draw, and the process kills itself there, in the
middle of a write too. Of five trials, two are resumed, one is resumed by two processes at once,
one finds the disk full in place of the kill, and one finds a file damaged after it.

Every run must then end as the uninterrupted one, to the bit, and pass `verify`; a damaged one may
be refused instead, unchanged. The figures are printed as JSON.
"""

import errno
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  imported before the forks
import torch

import fedsim
import fedsim.report.run
from fedsim.accountant.ledger.journal import FileJournal, JournalError
from fedsim.core.errors import FedsimError
from fedsim.report import html, plots  # noqa: F401
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import LOCK
from fedsim.runs.manifest import list_again
from fedsim.runs.verification import verify_run
from fedsim.server.secure.helper import Helper

EXPERIMENT: dict[str, Any] = {
    "name": "kills",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "federation": {"rounds": 5, "clients_per_round": 3},
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
DISTRIBUTED: dict[str, Any] = {
    **EXPERIMENT,
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 5}},
    "federation": {"rounds": 5},
    "local": {"steps": 1, "batch_size": 32},
    "privacy": {
        "target_epsilon": 9.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "trust": {"name": "distributed", "colluding_clients": 1},
    },
    "secure_aggregation": {"min_clients": 3, "on_abort": "skip_round"},
    "faults": [
        {"kind": "dropout_after", "clients": [1], "rounds": [2]},
        {"kind": "dropout_after", "clients": [2, 4], "rounds": [3]},
        {"kind": "dropout_after", "clients": [0, 1, 3], "rounds": [4]},  # below min_clients
    ],
}
SAME = ("model.safetensors", "privacy.json", "clients.csv", "ledger.jsonl", "experiment.yaml")
KINDS = ("kill",) * 2 + ("two processes", "full disk", "damage")
NOT_SOUND, TRACEBACK = 71, 72  # exit codes of a child

Act = Callable[[], None]


class Disk:
    """Counts the operations on the files of a run, and acts at one of them.

    Args:
        run: the run directory; operations on other files are not counted.
        at: number of the operation at which `act` is called, from 1; 0: never.
        act: kills the process, or raises an OSError.
        lasting: whether it is called at every later operation, too.
    """

    def __init__(self, run: Path, *, at: int = 0, act: Act | None = None, lasting: bool) -> None:
        self.count = 0
        self._run, self._at, self._act, self._lasting = run, at, act, lasting

    def install(self) -> None:
        """Count from now on, until the process ends."""
        for owner, name in ((os, "fsync"), (os, "replace"), (os, "unlink"), (os, "ftruncate")):
            setattr(owner, name, self._counted(getattr(owner, name)))
        open_file = Path.open

        def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            file = open_file(path, mode, *arguments, **options)
            ours = path.parent == self._run.parent or self._run.parent in path.parents
            return _File(file, self) if ours and set(mode) & set("wa+") else file

        Path.open = opened  # pyright: ignore[reportAttributeAccessIssue]

    def operation(self) -> None:
        """Count one operation."""
        self.count += 1
        due = self.count == self._at or (self._lasting and 0 < self._at < self.count)
        if due and self._act is not None:
            self._act()

    def _counted(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.operation()
            return function(*arguments, **options)

        return call


class _File:
    """A file whose writes count, in their middle."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> "_File":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._disk.operation()
        return half + self._file.write(data[half:])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def blank_page(directory: RunDirectory) -> None:
    directory.write_text("report.html", "blank")
    list_again(directory, "report.html")


class Waiting:
    """An callback that says that its run has begun and waits until it may go on."""

    def __init__(self, ready: int, go: int) -> None:
        self._ready, self._go = ready, go

    def started(self, federation: object, path: Path) -> None:
        os.write(self._ready, b"!")
        os.read(self._go, 1)

    def round_finished(self, row: Mapping[str, Any]) -> None: ...

    def ended(self) -> None: ...


def witness_sums(path: Path) -> None:
    """Write round and clients of each sum that a helper releases from now on to a file."""
    release = Helper._release

    def witnessed(helper: Helper, request: Any, seeds: Any) -> Any:
        line = json.dumps([request.server_round, sorted(request.clients)]) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        return release(helper, request, seeds)

    setattr(Helper, "_release", witnessed)  # noqa: B010  pyright knows no assignment to a method


def run_once(
    run: Path,
    said: Path,
    *,
    experiment: Mapping[str, Any] = EXPERIMENT,
    disk: Disk | None = None,
    callback: Any = None,
) -> None:
    """Start or resume a run in this process and end the process; what it says is in `said`."""
    code, text = 0, ""
    witness_sums(run.with_name(f"{run.name}.sums"))
    resume = (run / "experiment.yaml").exists()
    try:
        if disk is not None:
            disk.install()
        fedsim.run(experiment, out=run, resume=resume, callback=callback)
        if disk is None:
            problems = verify_run(RunDirectory.open(run)).problems
            code, text = (NOT_SOUND, "\n".join(problems)) if problems else (0, "")
    except FedsimError as error:
        code, text = int(error.exit_code), str(error)
    except BaseException:  # noqa: BLE001  a person would see a traceback
        code, text = TRACEBACK, traceback.format_exc()
    with open(said, "w") as file:  # not the counted Path.open
        file.write(text if disk is None else f"{disk.count}\n{text}")
    os._exit(code)


class Trials:
    """The trials in one directory, and their figures."""

    def __init__(
        self, directory: Path, seed: int, experiment: Mapping[str, Any] = EXPERIMENT
    ) -> None:
        self._directory, self._draw = directory, random.Random(seed)
        self._experiment = experiment
        self._said = directory / "said"
        self.figures: Counter[str] = Counter()
        self.faults: list[str] = []
        torch.set_num_threads(1)
        fedsim.report.run.write_report = blank_page
        self._whole = directory / "whole"
        self._child(lambda: self._once(self._whole, self._said))
        verify_run(RunDirectory.open(self._whole))  # the forks find the accountants' results
        counted = Disk(directory / "counted", lasting=False)
        self._child(lambda: self._once(directory / "counted", self._said, disk=counted))
        self.operations = int(self._said.read_text().splitlines()[0])

    def run(self, count: int) -> None:
        """Run trials of every kind in turn."""
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            run = self._directory / f"run-{number}"
            at = self._draw.randint(1, self.operations)
            before = len(self.faults)
            {
                "kill": self._kill,
                "two processes": self._two,
                "full disk": self._full,
                "damage": self._damage,
            }[kind](run, at)
            self.figures[kind] += 1
            for index in range(before, len(self.faults)):
                self.faults[index] = f"trial {number}, {kind} at {at}: {self.faults[index]}"
            if len(self.faults) == before:
                shutil.rmtree(run, ignore_errors=True)

    def _kill(self, run: Path, at: int) -> None:
        spent = self._killed(run, at)
        self._resumed(run, spent)

    def _two(self, run: Path, at: int) -> None:
        """One process resumes; the second comes when the first has the run."""
        spent = self._killed(run, at)
        (ready, say_ready), (go, say_go) = os.pipe(), os.pipe()
        other = self._directory / "said-first"
        first = os.fork()
        if first == 0:
            self._once(run, other, callback=Waiting(say_ready, go))
        os.read(ready, 1)
        before = _files(run)
        code = self._child(lambda: self._once(run, self._said))
        text = self._said.read_text()
        if code != 1 or f"in use by process {first} on" not in text or "\n" in text:
            self.faults.append(f"the second process ended with {code}: {text}")
        if _files(run) != before:
            self.faults.append("the second process changed the run")
        os.write(say_go, b"!")
        code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        for descriptor in (ready, say_ready, go, say_go):
            os.close(descriptor)
        self._check(run, code, other.read_text(), spent)

    def _full(self, run: Path, at: int) -> None:
        lasting = self._draw.random() < 0.5
        at = min(at, self.operations - 1)  # the last one removes the lock, which may fail
        disk = Disk(run, at=at, act=fill, lasting=lasting)
        code = self._child(lambda: self._once(run, self._said, disk=disk))
        text = self._said.read_text().partition("\n")[2]
        if code != 1 or "No space left on device" not in text or "\n" in text:
            self.faults.append(f"a full disk ended with {code}: {text}")
        self._resumed(run, _spent(run))

    def _damage(self, run: Path, at: int) -> None:
        """Damage one file after the kill: it is refused, or it makes no difference."""
        self._killed(run, at)
        names = sorted(_files(run))
        if not names:
            self._resumed(run, set())
            return
        name = self._draw.choice(names)
        how = self._damaged(run / name)
        before = _files(run)
        code = self._child(lambda: self._once(run, self._said))
        text = self._said.read_text()
        if code in (1, 2) and "\n" not in text:
            self.figures["damage refused"] += 1
            if _files(run) != before:
                self.faults.append(f"{name} {how}: refused, and changed: {text}")
            return
        self.figures["damage without effect"] += 1
        found = len(self.faults)
        self._check(run, code, text, set())
        self.faults[found:] = [f"{name} {how}: {fault}" for fault in self.faults[found:]]

    def _damaged(self, path: Path) -> str:
        data = path.read_bytes()
        how = self._draw.choice(("flipped", "cut", "emptied", "removed", "zeros at its end"))
        if how == "removed":
            path.unlink()
        elif how == "flipped" and data:
            place = self._draw.randrange(len(data))
            bit = 1 << self._draw.randrange(8)
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        elif how == "cut":
            path.write_bytes(data[: self._draw.randrange(len(data) + 1)])
        elif how == "zeros at its end":
            path.write_bytes(data[: -min(len(data), 40) or None] + bytes(40))
        else:
            path.write_bytes(b"")
        return how

    def _killed(self, run: Path, at: int) -> set[tuple[int, int]]:
        """Run until the operation at which the process kills itself; return what was spent."""
        disk = Disk(run, at=at, act=kill, lasting=False)
        code = self._child(lambda: self._once(run, self._said, disk=disk))
        if code != -signal.SIGKILL:
            self.faults.append(f"was not killed: {code} {self._said.read_text()}")
        self.figures["kills"] += 1
        return _spent(run)

    def _resumed(self, run: Path, spent: set[tuple[int, int]]) -> None:
        code = self._child(lambda: self._once(run, self._said))
        self._check(run, code, self._said.read_text(), spent)

    def _check(self, run: Path, code: int, text: str, spent: set[tuple[int, int]]) -> None:
        if code != 0:
            self.faults.append(f"ended with {code}: {text}")
            return
        if not spent <= _spent(run):
            self.faults.append("un-spent")
        for name in SAME:
            if (run / name).read_bytes() != (self._whole / name).read_bytes():
                self.faults.append(f"{name} differs from that of the uninterrupted run")
        self._check_sums(run)
        self.figures["ended as the uninterrupted run"] += 1

    def _check_sums(self, run: Path) -> None:
        """Compare the released sums of all processes of a run with those of the whole run."""
        least = (self._experiment.get("secure_aggregation") or {}).get("min_clients", 0)
        sums = _sums(run)
        if any(len(clients) < least for _, clients in sums):
            self.faults.append(f"a sum of fewer than {least} clients was opened: {sums}")
        if sums != _sums(self._whole):
            self.faults.append(f"other sums were opened than without the interruption: {sums}")

    def _once(self, run: Path, said: Path, **options: Any) -> None:
        run_once(run, said, experiment=self._experiment, **options)

    def _child(self, call: Callable[[], None]) -> int:
        """Call a function in a forked process and return its exit code."""
        child = os.fork()
        if child == 0:
            call()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _files(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path != run / LOCK
    }


def _spent(run: Path) -> set[tuple[int, int]]:
    """Return client and round of every record in the ledger of a run."""
    journal = FileJournal(run / "ledger.jsonl")
    try:
        return {
            (client, charge.round_number)
            for client in journal.clients()
            for charge in journal.history(client)
        }
    except JournalError:
        return set()


def _sums(run: Path) -> set[tuple[int, tuple[int, ...]]]:
    """Return round and clients of each sum that a helper of the run released, in any process."""
    path = run.with_name(f"{run.name}.sums")
    if not path.exists():
        return set()
    rows = map(json.loads, path.read_text().splitlines())
    return {(number, tuple(clients)) for number, clients in rows}


def figures_of(
    count: int, directory: Path, seed: int = 19, experiment: Mapping[str, Any] = EXPERIMENT
) -> dict[str, Any]:
    """Run trials; return how many there were of each kind, and what was wrong."""
    directory.mkdir(parents=True, exist_ok=True)
    trials = Trials(directory, seed, experiment)
    trials.run(count)
    return {"operations": trials.operations, **trials.figures, "faults": trials.faults}


def main() -> None:
    """Run the trials of the command line."""
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 19
    experiment = DISTRIBUTED if "distributed" in sys.argv[4:] else EXPERIMENT
    found = figures_of(int(sys.argv[1]), Path(sys.argv[2]), seed, experiment)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
