"""A node answers one experiment with a seed, whatever runs at once and wherever it is killed."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedsim.experiment import load_experiment
from fedsim.tools.deployment.node_state import client_ledger
from fedsim.tools.deployment.private_files import DeploymentError

claim_seed = partial(client_ledger, claims_seed=True)
pytestmark = pytest.mark.skipif(os.name != "posix", reason="starts processes with fork")

EXPERIMENT: dict[str, Any] = {
    "name": "e",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "mlp"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


def experiment(**changes: object) -> Any:
    return load_experiment(EXPERIMENT, changes).experiment


def test_of_processes_that_start_together_one_gets_the_seed(
    tmp_path: Path, at_once: Callable[..., list[list[int]]]
) -> None:
    """150 calls by six processes: every seed goes to exactly one of the six experiments."""

    def granted(number: int) -> list[int]:
        asked, seeds = experiment(**{"local.batch_size": number + 1}), []
        for seed in range(25):
            try:
                claim_seed(tmp_path / "state", asked.model_copy(update={"seed": seed}), 0)
                seeds.append(seed)
            except DeploymentError as error:
                if "choose another seed" not in str(error):
                    raise
        return seeds

    owners = [seed for seeds in at_once(granted, range(6)) for seed in seeds]
    assert sorted(owners) == list(range(25))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_kill_between_write_and_rename_leaves_a_node_that_works(
    tmp_path: Path, step: str
) -> None:
    child = os.fork()
    if child == 0:
        try:
            setattr(os, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            claim_seed(tmp_path, experiment(), 0)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    stored = tmp_path / "seed-0" / "client-0" / "experiment.json"
    assert not stored.exists(), "half of a file has its name"
    claim_seed(tmp_path, experiment(), 0)
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
