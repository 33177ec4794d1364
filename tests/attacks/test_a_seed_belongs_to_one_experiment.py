"""A node answers one experiment with a seed, whatever runs at once and wherever it is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsim.experiment import load_experiment
from fedsim.tools.deployment.node_state import claim_seed
from fedsim.tools.deployment.private_files import DeploymentError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="starts processes with fork")

EXPERIMENT: dict[str, Any] = {
    "name": "e",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "mlp"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
# Each child has an experiment of its own. All wait for the end of one pipe, then each asks for
# every seed; a child's answers are the seeds that were granted.
RACE = f"""
import json, os, sys
from pathlib import Path
from fedsim.tools.deployment.private_files import DeploymentError
from fedsim.tools.deployment.node_state import claim_seed
from fedsim.experiment import load_experiment

CHILDREN, SEEDS, state = 6, 25, Path(sys.argv[1])

def child(number, start, results):
    asked = load_experiment({EXPERIMENT!r}, {{"local.batch_size": number + 1}}).experiment
    os.read(start, 1)
    granted, refused = [], 0
    for seed in range(SEEDS):
        try:
            claim_seed(state, asked.model_copy(update={{"seed": seed}}), 0)
            granted.append(seed)
        except DeploymentError as error:
            assert "choose another seed" in str(error), error
            refused += 1
    os.write(results, (json.dumps([granted, refused]) + "\\n").encode())

start, go = os.pipe()
read, results = os.pipe()
pids = []
for number in range(CHILDREN):
    pid = os.fork()
    if not pid:
        os.close(go)
        code = 1
        try:
            child(number, start, results)
            code = 0
        finally:
            os._exit(code)
    pids.append(pid)
os.close(go)
os.close(results)
for pid in pids:
    assert os.waitpid(pid, 0)[1] == 0
print(open(read).read())
"""
KILLED = f"""
import os, signal, sys
from pathlib import Path
from fedsim.tools.deployment.node_state import claim_seed
from fedsim.experiment import load_experiment

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

experiment = load_experiment({EXPERIMENT!r}).experiment
for step in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        setattr(os, step, killed)
        claim_seed(Path(sys.argv[1], step), experiment, 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, step
"""


def experiment(**changes: object) -> Any:
    return load_experiment(EXPERIMENT, changes).experiment


def test_of_processes_that_start_together_one_gets_the_seed(tmp_path: Path) -> None:
    """150 calls by six processes: every seed goes to exactly one of the six experiments."""
    command = [sys.executable, "-c", RACE, str(tmp_path / "state")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.split("\n") if line]
    assert len(answers) == 6
    owners = [seed for granted, _ in answers for seed in granted]
    assert sorted(owners) == list(range(25))
    assert sum(refused for _, refused in answers) == 150 - 25


def test_a_kill_between_write_and_rename_leaves_a_node_that_works(tmp_path: Path) -> None:
    steps = ("fsync", "replace")
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path, *steps], capture_output=True)
    assert ended.returncode == 0, ended.stderr
    for step in steps:
        stored = tmp_path / step / "seed-0" / "client-0" / "experiment.json"
        assert not stored.exists(), "half of a file has its name"
        claim_seed(tmp_path / step, experiment(), 0)
        assert json.loads(stored.read_text())["experiment"]["name"] == "e"
        names = {path.name for path in stored.parent.iterdir()}
        assert names == {"experiment.json", "ledger.jsonl", "lock"}


def test_what_is_on_disk_was_forced_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps no name without its content: content first, then name, then directory."""
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def spy(*given: Any, name: str = name, real: Any = real) -> None:
            steps.append(name)
            real(*given)

        monkeypatch.setattr(os, name, spy)
    claim_seed(tmp_path, experiment(), 0)
    assert steps[:3] == ["fsync", "replace", "fsync"]


def test_the_first_experiment_stays(tmp_path: Path) -> None:
    """The file is written once: more rounds are allowed, and do not replace it."""
    claim_seed(tmp_path, experiment(), 0)
    stored = tmp_path / "seed-0" / "client-0" / "experiment.json"
    before = stored.read_bytes()
    claim_seed(tmp_path, experiment(**{"federation.rounds": 5}), 0)
    assert stored.read_bytes() == before
    with pytest.raises(DeploymentError, match=r"differs in local\.steps"):
        claim_seed(tmp_path, experiment(**{"local.steps": 5}), 0)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"experiment": 3}', "\0\0\0"])
def test_a_damaged_file_names_the_way_out(tmp_path: Path, content: str) -> None:
    claim_seed(tmp_path, experiment(), 0)
    stored = tmp_path / "seed-0" / "client-0" / "experiment.json"
    ledger = stored.with_name("ledger.jsonl")
    versions = json.loads(stored.read_text())
    del versions["experiment"]
    kept = json.loads(content) if content.startswith("{") and content != "{" else None
    stored.write_text(content if kept is None else json.dumps({**versions, **kept}))
    with pytest.raises(DeploymentError) as empty:
        claim_seed(tmp_path, experiment(), 0)
    assert f"{stored} is empty or damaged" in str(empty.value)
    assert str(empty.value).endswith("no charge was recorded beside it: delete it")
    ledger.write_text("a charge\n")
    with pytest.raises(DeploymentError, match="from a copy, or choose another seed"):
        claim_seed(tmp_path, experiment(), 0)
    ledger.write_text("")
    stored.unlink()
    claim_seed(tmp_path, experiment(), 0)
