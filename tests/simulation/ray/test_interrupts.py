"""Ctrl-C and SIGTERM under Ray: a summary, and no dump, process or file of Ray is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.simulation.engine import EngineError
from fedsim.simulation.engines import FlowerEngine

pytest.importorskip("ray", reason="engines ray and flower need the extra `ray`")

PATIENCE = 180.0  # seconds, as in test_engine.py
EXPERIMENT: dict[str, Any] = {
    "name": "stop",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 100_000},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 30.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
CODE = (
    # The background jobs of a shell ignore Ctrl-C, and so would what they start.
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "import sys; from fedsim.cli import main\n"
    "sys.argv = ['fedsim', 'run', 'e.json', '--out', 'r', '--quiet']; main()"
)


def commands_with(word: str) -> dict[int, str]:
    """Return the processes of this machine with a word in their command line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found[int(entry.name)] = line
    return found


def until(condition: Any, log: Path) -> Any:
    """Wait for a condition and return its value."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return value


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize(
    ("engine", "number"),
    [("ray", signal.SIGTERM), ("flower", signal.SIGINT)],
)
def test_an_interrupted_run_leaves_nothing_behind(
    tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    runtime = {"engine": engine, "workers": 1}
    (tmp_path / "e.json").write_text(json.dumps({**EXPERIMENT, "runtime": runtime}))
    log, rounds = tmp_path / "log", tmp_path / "r" / "rounds.jsonl"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: rounds.exists() and rounds.read_text().count("\n") >= 2, log)
        raylet = (Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()).split()
        lines = [Path(f"/proc/{child}/cmdline").read_bytes().decode() for child in raylet]
        found = {match for line in lines for match in re.findall(r"/tmp/fedsim-ray-\w+", line)}
        (session,) = found
        os.kill(process.pid, number)
        os.kill(process.pid, number)
        assert process.wait(timeout=PATIENCE) == 128 + number, log.read_text()
    finally:
        process.kill()
    until(lambda: not commands_with(session), log)
    assert not Path(session).exists()
    said = log.read_text()
    assert "received at time" not in said, "a dump of Ray's library"
    assert "to go on: fedsim run e.json --out r --resume" in said
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "interrupted"


class _Nodes:
    """The calls of a grid that an interrupted server app must not get through."""

    def get_node_ids(self) -> list[int]:
        time.sleep(0.01)
        return []

    push_messages = pull_messages = get_node_ids


def test_ray_is_not_disconnected_before_flowers_simulation_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ray ends a process whose threads use it after that: exit code 1 or 139, and no summary.
    events: list[str] = []

    def simulation(server_app: ServerApp, client_app: ClientApp, **options: Any) -> None:
        events.append("begun")
        os.kill(os.getpid(), signal.SIGINT)
        with suppress(EngineError):
            server_app(cast(Grid, _Nodes()), Context(1, 0, {}, RecordDict(), {}))
        events.append("ended")

    @contextmanager
    def connection(**options: Any) -> Iterator[None]:
        try:
            yield
        finally:
            events.append("disconnected")

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for _ in range(1000):
            grid.get_node_ids()

    monkeypatch.setattr("flwr.simulation.run_simulation", simulation)
    monkeypatch.setattr("fedsim.simulation.ray.session.local_ray", connection)
    # The background jobs of a shell ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            FlowerEngine(1).execute(app, ClientApp(), 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert events == ["begun", "ended", "disconnected"]
