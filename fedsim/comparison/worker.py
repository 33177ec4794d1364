"""A worker process that runs experiments: it reads jobs on stdin and writes messages on stdout.

A separate process starts with one thread for numerics, frees its memory at the end, and loses only
its current run when it crashes. It is `python -m fedsim.comparison.worker`, not a fork of the
caller, so a script that calls `fedsim.compare` needs no `if __name__ == "__main__"`.

Metrics on every client's own data are computed after the run from its final model and not sent in
messages. No ε covers them: a client's accuracy on its private data reveals information about it.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.commands import quick_imports
from fedsim.core.plugin_errors import contained_exits, error_text, type_name
from fedsim.core.python_objects import callable_of
from fedsim.core.text_formats import finite_or_none

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation
    from fedsim.runs.directory import RunDirectory


SendMessage = Callable[[dict[str, Any]], None]

RECORD = "comparison_run.json"


def serve_jobs() -> None:
    """Read jobs from stdin and run them, one after another, until stdin is closed."""
    # A background process of a shell ignores interrupts, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The output of a plug-in must not mix with the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        with quick_imports():
            import fedsim.report.run  # noqa: F401  what every job needs
        for line in sys.stdin:
            answer(json.loads(line), send)
    except KeyboardInterrupt:
        return


def answer(job: Mapping[str, Any], send: SendMessage) -> Mapping[str, Any]:
    """Run a job, and return the last message that was sent about it: `finished` or `failed`."""
    try:
        with contained_exits():
            status = _execute(job, send)
        last = {"event": "finished", "status": status}
    except KeyboardInterrupt:  # before or after the rounds; within them, the run handles it
        last = {"event": "finished", "status": "interrupted"}
    # A plug-in may raise any exception, and the other runs must continue.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        last = {"event": "failed", "reason": error_text(error) or type_name(error)}
    send(last)
    return last


def _execute(job: Mapping[str, Any], send: SendMessage) -> str:
    """Run a job and return the final status of its run."""
    import torch

    from fedsim.experiment import load_experiment
    from fedsim.federation.assembly import assemble
    from fedsim.report.run import run
    from fedsim.runs.directory import RunDirectory
    from fedsim.runs.runner import run_experiment

    torch.set_num_threads(1)
    path = Path(job["directory"])
    reporter = _RunReporter(job["record"], send)
    status, action = "completed", job["action"]
    if action in ("run", "resume"):
        execute = run if job.get("report", True) else run_experiment
        begin = partial(execute, base=job["base"], out=path, callback=reporter)
        status = begin(job["experiment"], resume=action == "resume").status
    if job["measure"] and status not in ("interrupted", "failed"):
        loaded = load_experiment(job["experiment"], base=job["base"])
        federation = reporter.federation or assemble(loaded, ledger=None)
        write_client_metrics(federation, RunDirectory(path))
    return status


@dataclass
class _RunReporter:
    """Callback that records the origin of a run before round 1, and sends a message every round."""

    record: Mapping[str, Any]
    send: SendMessage
    federation: Any = None

    def phase(self, name: str) -> None:
        """Send the name of the phase that starts."""
        self.send({"event": "phase", "name": name})

    def started(self, federation: Any, path: Path) -> None:
        """Write `comparison_run.json`, which names the variant, seed and fingerprint of the run."""
        from fedsim.comparison.differences import pair_digests
        from fedsim.runs.directory import RunDirectory
        from fedsim.runs.files import SCHEMAS

        self.federation, pairing = federation, pair_digests(federation)
        content = {"schema": SCHEMAS[RECORD], **self.record, "pairing": pairing}
        RunDirectory(path).write_json(RECORD, content)
        self.send({"event": "started", "rounds": federation.experiment.federation.rounds})

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """Send the number of the finished round."""
        self.send({"event": "round", "round": row["round"]})

    def ended(self) -> None:
        """Do nothing: the end of the job is sent with its status."""


CLIENT_METRICS = "client_metrics.json"
WARNING = (
    "Computed on the clients' private training data, outside the federation's messages, for the "
    "experimenter alone. No ε covers these figures: do not publish them for private data."
)


def write_client_metrics(federation: "Federation", directory: "RunDirectory") -> None:
    """Compute `client_metrics.json` of a finished run, write it, and list it in the manifest.

    Each client has the global model, or its own one where the algorithm trains one per client. The
    weights of the federation's model are overwritten.
    """
    from flwr.app import ArrayRecord

    from fedsim.models.tasks import evaluate
    from fedsim.runs.files import SCHEMAS
    from fedsim.runs.manifest import list_again
    from fedsim.runs.saved_model import load_core

    trained, build = federation.model, callable_of(federation.experiment.model.name)
    model = load_core(directory.path, base=federation.base, build=build).to(trained.device)
    checkpoint = directory.read_checkpoint()
    own = None if checkpoint is None else federation.scored_models(checkpoint.state)
    rows: list[dict[str, Any]] = []
    for client, examples in enumerate(federation.data.clients):
        if own is not None and not isinstance(own, ArrayRecord):
            model = trained.module
            model.load_state_dict(own[client].to_torch_state_dict())
        metrics = evaluate(model, trained.loss, trained.task, examples, device=trained.device)
        figures = {f"client_{name}": finite_or_none(value) for name, value in metrics.items()}
        rows.append({"client": client, "examples": len(examples), **figures})
    schema = SCHEMAS[CLIENT_METRICS]
    content = {"schema": schema, "private": True, "warning": WARNING, "clients": rows}
    directory.write_json(CLIENT_METRICS, content)
    list_again(directory, CLIENT_METRICS)


if __name__ == "__main__":
    serve_jobs()
