"""A process that runs experiments: jobs on stdin, news on stdout, both as lines of JSON.

A process of its own starts with one thread for numerics, gets memory back when it ends, and dies
alone. It is `python -m fedsim.comparison.worker`, not a fork or a copy of the caller's program:
a script that calls `fedsim.compare` needs no guard.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

News = Callable[[dict[str, Any]], None]

RECORD = "comparison_run.json"


def main() -> None:
    """Read jobs until there are no more."""
    # A caller in the background of a shell would hand on that interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whatever a plug-in prints must not get among the news.
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        news.write(json.dumps(message) + "\n")
        news.flush()

    try:
        for line in sys.stdin:
            _answer(json.loads(line), send)
    except KeyboardInterrupt:
        return


def _answer(job: Mapping[str, Any], send: News) -> None:
    try:
        send({"event": "finished", "status": _execute(job, send)})
    except KeyboardInterrupt:  # before or after the rounds; in them, the run ends by itself
        send({"event": "finished", "status": "interrupted"})
    # A plug-in may raise anything, and the other runs must go on.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        message = " ".join(str(error).split())
        send({"event": "failed", "reason": message or type(error).__name__})


def _execute(job: Mapping[str, Any], send: News) -> str:
    """Do a job and return the status of its run."""
    import torch

    from fedsim.comparison.client_metrics import write_client_metrics
    from fedsim.experiment import load_experiment
    from fedsim.federation.assembly import assemble
    from fedsim.report.html import write_report
    from fedsim.runs.directory import RunDirectory
    from fedsim.runs.runner import run_experiment

    torch.set_num_threads(1)
    path = Path(job["directory"])
    watcher = _Watcher(job["record"], send)
    status = "completed"
    if job["action"] in ("run", "resume"):
        status = run_experiment(
            job["experiment"],
            base=job["base"],
            out=path,
            resume=job["action"] == "resume",
            observer=watcher,
        ).status
        write_report(RunDirectory(path))
    if job["measure"] and status not in ("interrupted", "failed"):
        loaded = load_experiment(job["experiment"], base=job["base"])
        federation = watcher.federation or assemble(loaded, ledger=None)
        write_client_metrics(federation, RunDirectory(path))
    return status


class _Watcher:
    """Notes where a run came from before its first round, and passes on every round."""

    def __init__(self, record: dict[str, Any], send: News) -> None:
        self._record = record
        self._send = send
        self.federation: Any = None

    def started(self, federation: Any, path: Path) -> None:
        """Write `comparison_run.json`: without it nobody could tell whose run this is."""
        from fedsim.comparison.pairs import pairing_digests
        from fedsim.runs.directory import RunDirectory
        from fedsim.runs.schema import COMPARISON_SCHEMA

        self.federation = federation
        content = {
            "schema": COMPARISON_SCHEMA,
            **self._record,
            "pairing": pairing_digests(federation),
        }
        RunDirectory(path).write_json(RECORD, content)
        rounds = federation.experiment.federation.rounds
        self._send({"event": "started", "rounds": rounds})

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Pass on the number of the round."""
        self._send({"event": "round", "round": row["round"]})

    def ended(self) -> None:
        """Nothing is left to do."""


if __name__ == "__main__":
    main()
