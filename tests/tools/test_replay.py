"""A run is computed again from its experiment, its seed and its data, and is the recorded one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from torch import nn

from fedsim.cli import cli
from fedsim.clients.task import ClientTask
from fedsim.core.errors import ExitCode
from fedsim.federation.federation import Federation
from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import write_manifest
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.runs.verification import verify_run
from fedsim.simulation.engines import LocalEngine
from fedsim.tools.replay import Replay, ReplayImpossibleError, replay_run
from fedsim.tracking.callbacks import RunCallback

EXPERIMENT: dict[str, Any] = {
    "name": "replay",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 5}},
    "model": {"name": "mlp", "args": {"hidden": [16]}},
    "federation": {"rounds": 3, "clients_per_round": 4},
    "local": {"steps": 2, "batch_size": 24},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


def replayed(path: Path, base: Path | None = None) -> Replay:
    directory = RunDirectory.open(path)
    assert verify_run(directory).problems == ()
    found = replay_run(directory, base=base)
    assert found.problems == ()
    return found


def run_of(change: dict[str, Any], out: Path, **options: Any) -> Path:
    return run_experiment(EXPERIMENT, overrides=change, out=out, **options).path


GIVEN_UP: dict[str, Any] = {  # round 2 is given up, and the model stays as after round 1
    "secure_aggregation": {"aggregators": 2, "min_clients": 3, "on_abort": "skip_round"},
    "faults": [{"kind": "dropout_during", "clients": [0, 1, 2], "rounds": [2]}],
}
HONEST: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "pairwise masks": (
        {
            "secure_aggregation": {"protocol": "secagg"},
            "faults": [{"kind": "dropout_after", "clients": [1], "rounds": [2]}],
            "federation.rounds": 2,
        },
        (2, 0, 8),
    ),
    "a sum that was given up": (GIVEN_UP, (3, 0, 12)),
    "a sum with the server's noise that was given up": (
        {
            **GIVEN_UP,
            "privacy.trust": "central",
            "privacy.unit": "client",
            "privacy.max_update_norm": 0.5,
            "privacy.max_grad_norm": None,
        },
        (3, 0, 12),
    ),
    "adaptive clipping": (
        {"privacy.clipping": "adaptive", "local.batch_size": 60, "federation.rounds": 2},
        (2, 8, 8),
    ),
    "random allocation": ({"privacy.sampling": "balls_and_bins"}, (3, 12, 12)),
    "evaluation by clients": (
        {"privacy": None, "evaluation": {"holdout": 0.2}, "federation.rounds": 2},
        (2, 8, 0),
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_is_computed_again(name: str, tmp_path: Path) -> None:
    change, (rounds, uploads, charges) = HONEST[name]
    found = replayed(run_of(change, tmp_path / "r"))
    assert (found.rounds, found.uploads, found.charges) == (rounds, uploads, charges)


FAULTS = [
    {"kind": "dropout_before", "clients": [0], "rounds": [1]},
    {"kind": "dropout_during", "clients": [1], "rounds": [1, 2]},
    {"kind": "dropout_after", "clients": [2], "rounds": [2]},
    {"kind": "nan", "clients": [3], "rounds": [1]},
    {"kind": "straggler", "clients": [4], "rounds": [2, 3], "delay": 9.0},
    {"kind": "error", "clients": [0], "rounds": [3]},
]


@pytest.mark.parametrize("change", [{}, {"privacy": None}])
def test_faults_and_late_clients_are_repeated(change: dict[str, Any], tmp_path: Path) -> None:
    """A late or invalid update left its client, so it is compared, too."""
    faulty = {**change, "faults": FAULTS, "federation.deadline": 5.0}
    path = run_of({**faulty, "federation.clients_per_round": 5}, tmp_path / "r")
    releases = [json.loads(line)["uploads"] for line in (path / "releases.jsonl").open()]
    assert "3" in releases[0]  # refused by the server
    assert "4" in releases[1]  # came too late
    assert replayed(path).uploads == sum(map(len, releases))


def test_a_client_that_failed_on_its_machine_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = ClientTask.check_examples

    def out_of_memory(self: ClientTask) -> None:
        if self.client == 2:
            raise MemoryError("of this machine")
        check(self)

    with monkeypatch.context() as patch:
        patch.setattr(ClientTask, "check_examples", out_of_memory)
        path = run_of({"federation.clients_per_round": 5}, tmp_path / "r")
    found = replayed(path)
    assert (found.rounds, found.uploads, found.charges) == (3, 12, 12)


def test_withdrawals_are_repeated(tmp_path: Path) -> None:
    change = {
        "privacy.clients": {"1": {"target_epsilon": 0.9}},
        "privacy.target_epsilon": 9.0,
        "privacy.on_exhausted": "withdraw",
    }
    path = run_of(change, tmp_path / "r")
    rows = [json.loads(line) for line in (path / "rounds.jsonl").open()]
    assert any(row["withdrawn"] or row["shortened"] for row in rows)
    replayed(path)


def test_a_resumed_run_is_computed_again(
    stop_after: Callable[[int], RunCallback], tmp_path: Path
) -> None:
    path = run_of({}, tmp_path / "r", callback=stop_after(2))
    interrupted = replayed(path)
    assert interrupted.rounds == 2
    run_of({}, path, resume=True)
    whole = replayed(path)
    assert (whole.rounds, whole.uploads, whole.charges) == (3, 12, 12)


def test_a_round_that_was_charged_and_never_finished_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    test_metrics, calls = Federation.test_metrics, list[int]()

    def stop_in_third(self: Federation, arrays: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return test_metrics(self, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "test_metrics", stop_in_third)
        path = run_of({}, tmp_path / "r")
    found = replayed(path)
    assert (found.rounds, found.uploads, found.charges) == (3, 8, 12)
    run_of({}, path, resume=True)
    assert replayed(path).uploads == 12


def test_a_failed_run_is_computed_again(tmp_path: Path) -> None:
    change = {"faults": [{"kind": "error", "rounds": [2]}]}
    with pytest.raises(RunFailedError):
        run_of(change, tmp_path / "r")
    assert replayed(tmp_path / "r").rounds == 2


class Alone(LocalEngine):
    """As Flower's engine: every client is a block of its own."""

    plans_blocks = False


def test_blocks_of_one_are_repeated_as_blocks_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.federation.blocks.BlockPlan.block_of", lambda self, number, k: (k,))
        path = run_of({"federation.rounds": 2}, tmp_path / "r", engine=Alone())
    replayed(path)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_run_in_other_processes_is_computed_again(tmp_path: Path) -> None:
    replayed(run_of({"runtime.engine": "ray", "runtime.workers": 1}, tmp_path / "r"))


# --- The command ----------------------------------------------------------------------------------

PLUGIN = """
import numpy as np


def load(seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(200, 6)).astype(np.float32), np.arange(200) % 3
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("finished")
    (base / "p.py").write_text(PLUGIN)
    change = {"data.dataset": "./p.py:load", "federation.rounds": 2}
    run_of(change, base / "r", base=base)
    return base


@pytest.fixture
def base(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def verify(base: Path, *options: object) -> Result:
    arguments = ["verify", str(base / "r"), "--replay", *map(str, options)]
    return CliRunner().invoke(cli, arguments)


def test_the_command_says_what_was_computed_again(base: Path) -> None:
    found = verify(base, "--base", base)
    assert found.exit_code == ExitCode.DONE, found.output
    assert "replayed: 2 rounds, 8 uploads, 8 charges, all as recorded" in found.stdout
    content = json.loads(verify(base, "--base", base, "--json").stdout)
    assert content["sound"] is True
    assert content["replayed"] == {"rounds": 2, "uploads": 8, "charges": 8}


def test_what_cannot_be_replayed_is_neither_sound_nor_wrong(base: Path, tmp_path: Path) -> None:
    assert "--base names the directory" in refusal(base, base=tmp_path)
    (base / "p.py").write_text(PLUGIN.replace("size=(200", "scale=2.0, size=(200"))
    assert "a replay needs the original" in refusal(base, base=base)
    (base / "p.py").unlink()
    assert "p.py" in refusal(base, base=base)
    assert isinstance(verify(base, "--base", base).exception, ReplayImpossibleError)


def refusal(run: Path, base: Path | None) -> str:
    with pytest.raises(ReplayImpossibleError) as refused:
        replay_run(RunDirectory.open(run / "r"), base=base)
    assert refused.value.exit_code == ExitCode.WRONG_INPUT
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_a_run_of_python_objects_names_the_file_that_would_help(tmp_path: Path) -> None:
    def build(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 10))

    change = {"model": {"name": build, "args": {"inputs": 64}}, "privacy": None}
    run_of(change, tmp_path / "r")
    said = refusal(tmp_path, base=tmp_path)
    assert said.startswith("python:build of this run is a Python object")
    assert said.endswith("write it into a file and name it ./file.py:build")  # and no --base


def test_secure_noise_cannot_be_replayed(tmp_path: Path) -> None:
    run_of({"privacy.noise": "secure", "federation.rounds": 1}, tmp_path / "r")
    assert "noise: secure" in refusal(tmp_path, base=None)


@pytest.mark.parametrize(
    ("name", "said"),
    [("fedsim.federation.federation.np.__version__", "numpy"), (None, "kind of processor")],
)
def test_other_versions_or_processors_cannot_be_replayed(
    name: str | None, said: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is None:
        monkeypatch.setattr("fedsim.federation.federation.device_kind", lambda device: "other")
    else:
        monkeypatch.setattr("numpy.__version__", "9.9.9")
    text = refusal(base, base=base)
    assert said in text
    assert "round 1" in text
    assert "the last bits may differ" in text


def test_a_run_of_another_version_cannot_be_replayed(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.__version__", "9.9.9")
    assert "replay it with the version that wrote it" in refusal(base, base=base)


def test_files_that_do_not_agree_are_not_replayed(base: Path) -> None:
    (base / "r" / "releases.jsonl").unlink()
    found = verify(base, "--base", base)
    assert found.exit_code == ExitCode.FAILED
    assert "releases.jsonl: listed in manifest.json and missing" in found.stderr
    write_manifest(RunDirectory.open(base / "r"))
    assert "releases.jsonl" in verify(base, "--base", base).stderr
