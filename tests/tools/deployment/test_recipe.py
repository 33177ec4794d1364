"""docs/howto/deployment.md, block by block: processes, keys, signatures; processes that die."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "howto" / "deployment.md"
PATIENCE = 280.0
PORTS = ("18000", "18001", "19094", "19095", "19096", "19097")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix", reason="Flower's processes are POSIX"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("openssl", "ssh-keygen", "bash"))),
        reason="the page makes its keys with openssl and ssh-keygen",
    ),
]


class Recipe:
    """The blocks of the page, by the comment in their first line, and their processes."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home, self._environment = home, environment
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        text = PAGE.read_text()
        (first,) = re.findall(r"```console\n# operator of node 0: its.*?```", text, re.S)
        for node in (1, 2):  # which start in the same way, as the page says
            other = re.sub(r"(node[ -]|partition-id=)0", rf"\g<1>{node}", first)
            text += "\n" + other.replace("19094", str(19094 + node))
        for port in PORTS:
            text = text.replace(port, str(_free_port()))
        text = text.replace("/srv/fedsim", str(home))
        found = re.findall(r"```console\n# ([^\n]*)\n(.*?)```", text, re.S)
        self.blocks = dict(found)
        assert len(self.blocks) == len(found), "two blocks have the same first line"
        (self.config,) = re.findall(r"```toml\n(\[superlink.*?)```", text, re.S)
        self.left = set(self.blocks)

    def script(self, start: str) -> str:
        """Return a block by the start of its first line, after that of every terminal."""
        (name,) = [name for name in self.blocks if name.startswith(start)]
        self.left.discard(name)
        return self.blocks["every terminal"] + self.blocks[name]

    def run(self, start: str) -> str:
        """Run a block to its end."""
        return self.bash(self.script(start))

    def bash(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}{self.log()}"
        return done.stdout

    def start(self, start: str) -> None:
        """Start a block in a terminal of its own."""
        with self._log(start).open("ab") as log:
            self._processes[start] = subprocess.Popen(
                ["bash", "-c", self.script(start)],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, start: str) -> None:
        """End the processes of a block as a power cut would: kill -9."""
        process = self._processes.pop(start)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        for start in list(self._processes):
            self.kill(start)

    def log(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-4000:]}" for path in self.home.glob("*.log")
        )

    def log_of(self, start: str) -> str:
        """Return what the processes of a block have printed."""
        return self._log(start).read_text()

    def _log(self, start: str) -> Path:
        return self.home / f"{start.replace(' ', '-').replace(':', '')}.log"

    def wait(self, done: Callable[[], bool], otherwise: str) -> None:
        until = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < until, f"{otherwise}\n{self.log()}"
            time.sleep(0.2)

    def online(self) -> int:
        """Return how many SuperNodes the SuperLink lists as connected."""
        listed = self.bash(f"{self.blocks['every terminal']}flwr supernode ls here --format json")
        nodes = json.loads(listed[listed.index("{") :]).get("nodes", [])  # none: no SuperLink
        return sum(node["status"] == "online" for node in nodes)

    def status(self, run: str) -> str:
        """Return Flower's status of a run."""
        listed = self.bash(
            f"{self.blocks['every terminal']}flwr ls here --run-id {run} --format json"
        )
        return json.loads(listed[listed.index("{") :])["runs"][0]["status"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def recipe(site, tmp_path: Path) -> Iterator[Recipe]:
    home = tmp_path / "srv"
    home.mkdir()
    shutil.copy(ROOT / "experiments" / "digits_dp_secure.yaml", home)
    found = Recipe(home, site.environment(home))
    (home / "flwr").mkdir()
    (home / "flwr" / "config.toml").write_text(found.config)
    try:
        yield found
    finally:
        found.kill_all()


def rounds(run: Path) -> list[dict]:
    path = run / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


LINK, STORE = "operator of the SuperLink: the SuperLink", "operator of the SuperLink: the app store"
HELPER = "operator of the helper: its SuperNode"
NODES = [*(f"operator of node {n}" for n in range(3)), HELPER]


def lost_rounds(run: Path) -> list[int]:
    """Return the rounds after round 1 whose sum could not be opened."""
    return [row["round"] for row in rounds(run) if row["secure_aggregation"]["aborted"]]


def submitted(printed: str) -> str:
    return re.findall(r"Successfully started run (\d+)", printed)[0]


def test_the_recipe_outlives_dead_processes(recipe: Recipe) -> None:
    run = recipe.home / "run"
    for block in (
        "operator of the SuperLink: an authority",
        "operator of each node",
        "reviewer: a key",
        "operator of the helper: a lasting key",
        "author",
        "reviewer: sign",
    ):
        recipe.run(block)
    for process in (STORE, LINK):
        recipe.start(process)
    recipe.wait(lambda: "Uvicorn running" in recipe.log_of(LINK), "the SuperLink does not listen")
    recipe.run("operator of the SuperLink: register")
    for process in NODES:
        recipe.start(process)
    recipe.wait(lambda: recipe.online() == 4, "the nodes do not connect")

    # unsigned code never starts on a node
    unsigned = recipe.home / "unsigned"
    every = recipe.blocks["every terminal"]
    first = submitted(recipe.bash(f"{every}flwr run app here -c 'out=\"{unsigned}\"'"))
    recipe.wait(lambda: recipe.status(first).startswith("finished"), "the unsigned run stays")
    assert recipe.status(first) == "finished:failed"
    for process in NODES:
        assert "The FAB could not be verified." in recipe.log_of(process)
    assert not (recipe.home / "node-0").exists(), "no client began"

    # a client dies in round 2, after its charge
    submitted(recipe.run("submitter"))
    ledger = recipe.home / "node-1" / "seed-0" / "client-1" / "ledger.jsonl"

    def charged(count: int) -> bool:
        return ledger.exists() and len(ledger.read_text().splitlines()) == count

    recipe.wait(lambda: charged(2), "client 1 is not charged for round 2")
    recipe.kill(NODES[1])
    recipe.start(NODES[1])
    recipe.wait(lambda: len(rounds(run)) >= 2, "the run stands still")
    assert [one["client"] for one in rounds(run)[1]["failed"]] == [1]
    assert rounds(run)[1]["participants"] == [0, 2]
    recipe.wait(lambda: 1 in rounds(run)[-1]["participants"], "client 1 does not come back")

    assert "Failed to activate SuperNode." in recipe.log_of(NODES[1])

    # the helper dies: a round is lost, and the next one is not
    recipe.kill(HELPER)
    recipe.start(HELPER)
    recipe.wait(lambda: lost_rounds(run) != [], "no round is given up without the helper")
    (lost,) = lost_rounds(run)
    recipe.wait(lambda: rounds(run)[-1]["round"] > lost, "the run stands still")
    assert rounds(run)[lost]["participants"] == [0, 1, 2], "the helper comes back"

    # the SuperLink dies, and with it the server's process
    recipe.kill(LINK)
    before = len(rounds(run))
    recipe.start(LINK)
    recipe.wait(lambda: recipe.online() == 4, "the nodes do not reconnect")
    last = submitted(recipe.run("submitter"))
    recipe.wait(lambda: recipe.status(last).startswith("finished"), "the run does not end")
    assert recipe.status(last) == "finished:completed", recipe.log()
    assert before < len(rounds(run)) == 7
    # With secure noise the interrupted round is charged again, so a budget may end early.
    end = rounds(run)[-1]
    missing = [one["client"] for one in [*end["failed"], *end["withdrawn"]]]
    assert sorted([*end["participants"], *missing]) == [0, 1, 2], end
    assert len(end["participants"]) >= 2, end
    recipe.bash(f"{every}fedsim verify run")
    assert not recipe.left - {"every terminal"}, "blocks of the page that nobody ran"


def test_the_open_flower_has_no_accounts(recipe: Recipe) -> None:
    """As the page says: nothing but the network decides who may submit."""
    text = re.search(r"ends with `(OIDC[^`]*)`", PAGE.read_text())
    assert text is not None
    found = recipe.bash("FLWR_OIDC_ENABLED=1 flower-superlink --insecure 2>&1 || true")
    assert " ".join(text[1].split()) in found
