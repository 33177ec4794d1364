"""A federation of real processes on localhost: one SuperLink, two SuperNodes, `flwr run`."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.federation.helper_keys import make_helper_key
from fedsim.runs.directory import RunDirectory
from fedsim.runs.verification import verify_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="Flower's processes are POSIX"),
]

MODEL = """\
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
EXPERIMENT: dict[str, Any] = {
    "name": "deployed",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 2, "min_examples": 20},
    },
    "model": {"name": "./net.py:build"},
    "federation": {"rounds": 1},
    "local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "clipping": "adaptive",
    },
}
PATIENCE = 240.0


class Deployment:
    """The processes of a deployment and where they live."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bin = home / "bin"
        _write_commands(self._bin)
        self.environment = {
            **os.environ,
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._link_port = _free_port()
        (home / "flwr").mkdir()
        (home / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "dep"\n\n[superlink.dep]\n'
            f'address = "127.0.0.1:{self._link_port}"\ninsecure = true\n'
        )

    def start_link(self) -> None:
        port = str(self._link_port)
        self._start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port)
        _wait(lambda: _listens(self._link_port), "the SuperLink does not listen", self.log)

    def start_node(self, number: int, *, nodes: int = 2, **config: Path) -> subprocess.Popen[bytes]:
        named = {"state": self.home / f"node-{number}", **config}
        paths = " ".join(f'{name.replace("_", "-")}="{path}"' for name, path in named.items())
        return self._start(
            "flower-supernode",
            "--insecure",
            *("--superlink", f"127.0.0.1:{self._link_port}"),
            *("--host", "127.0.0.1", "--port", str(_free_port())),
            *("--node-config", f"partition-id={number} num-partitions={nodes} {paths}"),
        )

    def flwr(self, *arguments: str) -> str:
        result = subprocess.run(
            [self._bin / "flwr", *arguments],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stdout + result.stderr + self.log()
        return result.stdout

    def run_app(self, app: Path, out: Path) -> str:
        """Submit the app, wait for its end, and return Flower's status of it."""
        answer = self.flwr("run", str(app), "dep", "-c", f'out="{out}"', "--format", "json")
        run_id = str(json.loads(answer[answer.index("{") :])["run-id"])
        status = ""

        def ended() -> bool:
            nonlocal status
            listed = self.flwr("ls", "dep", "--run-id", run_id, "--format", "json")
            status = json.loads(listed[listed.index("{") :])["runs"][0]["status"]
            return status.startswith("finished")

        _wait(
            ended, "the run does not end", self.log, pause=8.0
        )  # a command of a second or two on a busy processor
        return status

    def log(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.home.glob("*.log")))

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and its children, as a power cut would."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                self.stop(process)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.home / f"{name}-{len(self._processes)}.log").open("wb")
        process = subprocess.Popen(
            [self._bin / name, *arguments],
            env=self.environment,
            cwd=self.home,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process


def _write_commands(directory: Path) -> None:
    """Write Flower's commands for this interpreter, wherever they were installed."""
    directory.mkdir(parents=True)
    for entry in distribution("flwr").entry_points:
        if entry.group == "console_scripts":
            path = directory / entry.name
            path.write_text(
                f"#!{sys.executable}\nimport sys\nfrom {entry.module} import {entry.attr}\n"
                f"sys.exit({entry.attr}())\n"
            )
            path.chmod(0o755)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(done: Any, otherwise: str, log: Any, *, pause: float = 0.2) -> None:
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until, f"{otherwise}\n{log()}"
        time.sleep(pause)


@contextmanager
def deployment(home: Path) -> Iterator[Deployment]:
    running = Deployment(home)
    try:
        running.start_link()
        yield running
    finally:
        running.stop_all()


def written(directory: Path, experiment: dict[str, Any], name: str) -> Path:
    """Write an experiment with its plug-in, and return its file."""
    (directory / "net.py").write_text(MODEL)
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps(experiment))
    return path


def deploy(experiment: Path, app: Path, *overrides: str) -> None:
    """Write the app of an experiment, as a user does."""
    command = [sys.executable, "-c", "from fedsim.cli import main; main()", "deploy"]
    command += [experiment.name, *overrides, "--out", str(app)]
    subprocess.run(command, cwd=experiment.parent, check=True, capture_output=True)


def test_two_supernodes_give_the_local_result_also_over_a_restart(tmp_path: Path) -> None:
    """Round 1, a power cut on both nodes, and round 2: the bits and ledgers of one local run.

    Then, on the same nodes, an experiment without privacy whose clients also evaluate.
    """
    private = written(tmp_path, EXPERIMENT, "private")
    local = fedsim.run(private, overrides={"federation.rounds": 2}, out=tmp_path / "local")
    for rounds in (1, 2):
        deploy(private, tmp_path / f"app-{rounds}", f"federation.rounds={rounds}")
    without = {k: v for k, v in EXPERIMENT.items() if k != "privacy"}
    open_book = written(
        tmp_path, {**without, "name": "open", "seed": 1, "evaluation": {"holdout": 0.2}}, "open"
    )
    deploy(open_book, tmp_path / "app-3")
    home, out = home_of(tmp_path), tmp_path / "run"
    with deployment(home) as running:
        nodes = [running.start_node(client) for client in (0, 1)]
        assert running.run_app(tmp_path / "app-1", out) == "finished:completed", running.log()
        assert len((out / "rounds.jsonl").read_text().splitlines()) == 1
        for node in nodes:
            running.stop(node)
        shutil.rmtree(home / "flwr" / "apps", ignore_errors=True)
        for client in (0, 1):
            running.start_node(client)
        assert running.run_app(tmp_path / "app-2", out) == "finished:completed", running.log()
        for name in ("model.safetensors", "privacy.json", "clients.csv"):
            assert (out / name).read_bytes() == (local.path / name).read_bytes(), name
        for client in (0, 1):
            ledger = home / f"node-{client}" / "seed-0" / f"client-{client}" / "ledger.jsonl"
            assert stat.S_IMODE(ledger.stat().st_mode) == 0o600
            own = [line for line in _lines(local.path) if json.loads(line)["client"] == client]
            assert ledger.read_text().splitlines() == own
        assert sorted(_lines(out)) == sorted(_lines(local.path))
        assert verify_run(RunDirectory(out)).problems == ()
        simulated = fedsim.run(open_book, out=tmp_path / "simulated").path
        out = tmp_path / "evaluated"
        assert running.run_app(tmp_path / "app-3", out) == "finished:completed", running.log()
    assert (out / "model.safetensors").read_bytes() == (
        simulated / "model.safetensors"
    ).read_bytes()
    found, expected = (
        json.loads((run / "rounds.jsonl").read_text().splitlines()[-1]) for run in (out, simulated)
    )
    for name in ("evaluated", "clients_loss", "clients_accuracy"):
        assert found[name] == expected[name], name


def test_a_pinned_helper_on_a_supernode_opens_the_sum_of_the_local_run(tmp_path: Path) -> None:
    """Two clients and a helper, each on its own node: the bits of a simulation, and its charges."""
    key = make_helper_key(home_of(tmp_path) / "helper.key")
    experiment = written(
        tmp_path,
        {**EXPERIMENT, "privacy": {**EXPERIMENT["privacy"], "clipping": "flat"}}
        | {
            "secure_aggregation": {
                "aggregators": 2,
                "min_clients": 2,
                "helper_key_fingerprints": [key.fingerprint],
            }
        },
        "hidden",
    )
    files = {"secure_aggregation.helper_key_files": [str(tmp_path / "home" / "helper.key")]}
    local = fedsim.run(experiment, overrides=files, out=tmp_path / "local")
    deploy(experiment, tmp_path / "app")
    out = tmp_path / "run"
    with deployment(tmp_path / "home") as running:
        for client in (0, 1):
            running.start_node(client, nodes=3)
        running.start_node(2, nodes=3, helper_key=tmp_path / "home" / "helper.key")
        assert running.run_app(tmp_path / "app", out) == "finished:completed", running.log()
    for name in ("model.safetensors", "clients.csv"):
        assert (out / name).read_bytes() == (local.path / name).read_bytes(), name
    assert sorted(_lines(out)) == sorted(_lines(local.path))
    limits = [
        {
            point["id"]
            for point in json.loads((run / "privacy.json").read_text())["statement_points"]
        }
        for run in (out, local.path)
    ]
    assert limits[1] - limits[0] == {"parties_on_one_host"}, "here the parties are real"
    assert "unseen_updates" in limits[0] & limits[1]
    assert not (tmp_path / "home" / "node-2" / "seed-0").exists(), "a helper keeps no ledger"


def home_of(directory: Path) -> Path:
    """Return a new home for a deployment."""
    home = directory / "home"
    home.mkdir()
    return home


def _lines(run: Path) -> list[str]:
    return (run / "ledger.jsonl").read_text().splitlines()
