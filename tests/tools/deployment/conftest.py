"""Real processes on localhost: one SuperLink, some SuperNodes, `flwr run`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedsim.cli import cli

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
    "local": {
        **{
            "steps": 2,
            "batch_size": 32,
            "vectorized_clients": "off",
        },  # a SuperNode trains its client alone
        "optimizer": {"name": "sgd", "lr": 0.5},
    },
    "privacy": {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "clipping": "adaptive",
    },
}
PATIENCE = 240.0
PAUSE = 15.0


class Deployment:
    """The processes of a deployment and where they live."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bin = home / "bin"
        self.environment = {
            **environment_of(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
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
        """Submit the app, wait for its end, and return Flower's status of it.

        Flower is asked when the run has written its summary, and now and then: its command takes
        a second or two of a busy processor.
        """
        submitted, summary = time.time(), out / "summary.json"
        answer = self.flwr("run", str(app), "dep", "-c", f'out="{out}"', "--format", "json")
        run_id = str(json.loads(answer[answer.index("{") :])["run-id"])
        status, asked = "", time.monotonic()

        def ended() -> bool:
            nonlocal status, asked
            written = summary.exists() and summary.stat().st_mtime >= submitted
            if not written and time.monotonic() - asked < PAUSE:
                return False
            asked = time.monotonic()
            listed = self.flwr("ls", "dep", "--run-id", run_id, "--format", "json")
            status = json.loads(listed[listed.index("{") :])["runs"][0]["status"]
            return status.startswith("finished")

        _wait(ended, "the run does not end", self.log)
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


def environment_of(home: Path) -> dict[str, str]:
    """Return an environment with the commands of Flower and fedsim, and Flower's home in `home`."""
    _write_commands(home / "bin")
    return {
        **os.environ,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home / "flwr"),
        "OMP_NUM_THREADS": "1",
    }


def _write_commands(directory: Path) -> None:
    """Write the commands for this interpreter, wherever they were installed."""
    directory.mkdir(parents=True)
    scripts = {"python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}
    commands = {
        entry.name: (entry.module, entry.attr)
        for entry in distribution("flwr").entry_points
        if entry.group == "console_scripts"
    }
    for name, (module, function) in {**commands, "fedsim": ("fedsim.cli", "main")}.items():
        scripts[name] = (
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
    for name, text in scripts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(done: Callable[[], bool], otherwise: str, log: Callable[[], str]) -> None:
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until, f"{otherwise}\n{log()}"
        time.sleep(0.2)


class Site:
    """A directory with experiments, and a home for the processes that deploy them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.home.mkdir()

    def written(self, name: str, **sections: Any) -> Path:
        """Write an experiment with its plug-in, and return its file."""
        content = {**EXPERIMENT, **sections}
        (self.directory / "net.py").write_text(MODEL)
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps(content))
        return path

    def deploy(self, experiment: Path, name: str, *overrides: str) -> Path:
        """Write the app of an experiment, as a user does, and return its directory."""
        app = self.directory / name
        done = CliRunner().invoke(cli, ["deploy", str(experiment), *overrides, "--out", str(app)])
        assert done.exit_code == 0, done.output
        return app

    @staticmethod
    def ledger(run: Path) -> list[str]:
        """Return the records of a run's ledger, as they are written."""
        return (run / "ledger.jsonl").read_text().splitlines()

    @staticmethod
    def environment(home: Path) -> dict[str, str]:
        """Return an environment with the commands of Flower and fedsim, as installed."""
        return environment_of(home)

    @contextmanager
    def running(self) -> Iterator[Deployment]:
        """Start a SuperLink, and stop every process at the end."""
        running = Deployment(self.home)
        try:
            running.start_link()
            yield running
        finally:
            running.stop_all()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
