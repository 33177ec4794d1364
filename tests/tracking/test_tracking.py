"""Trackers are told what rounds.jsonl says, and no run is lost to one.

The adapters are tested with the real packages where they are installed (extras `tensorboard`,
`mlflow`, `wandb`) and skipped elsewhere.
"""

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import fedsim
from fedsim.experiment import load_experiment
from fedsim.planning.validation import find_footprint
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.simulation import settings
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.private_files import DeploymentError
from fedsim.tools.replay import replay_run
from fedsim.tracking import trackers as tracking
from fedsim.tracking.callbacks import TrackedRun, Tracker
from fedsim.tracking.mlflow import MlflowTracker
from fedsim.tracking.trackers import TrackerError

EXPERIMENT = {
    "name": "tracked",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "max_grad_norm": 1.0},
}


def run(
    out: Path, *trackers: str, rounds: int = 2, resume: bool = False
) -> list[dict[str, object]]:
    overrides = {"runtime.trackers": list(trackers), "federation.rounds": rounds}
    path = run_experiment(EXPERIMENT, overrides=overrides, out=out, resume=resume).path
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


class Recording:
    """A tracker that remembers, and fails in a round of choice."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.runs: list[TrackedRun] = []
        self.rounds: dict[int, dict[str, float]] = {}
        self.finished = 0
        self._fails_in = fails_in

    def start(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def log(self, round_number: int, metrics: Mapping[str, float]) -> None:
        if round_number == self._fails_in:
            raise OSError("disk full")
        self.rounds[round_number] = dict(metrics)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Stands where tensorboard does, which need not be installed for it."""
    recording = Recording()
    use(monkeypatch, recording)
    return recording


def use(monkeypatch: pytest.MonkeyPatch, tracker: Tracker) -> None:
    monkeypatch.setattr(tracking, "TRACKERS", {"tensorboard": lambda: tracker})
    monkeypatch.setattr(tracking, "find_spec", lambda name: name)


def test_a_tracker_is_told_every_line_of_rounds_jsonl_and_changes_no_result(
    tmp_path: Path, record: Recording
) -> None:
    rows = run(tmp_path / "r", "tensorboard")
    assert list(record.rounds) == [1, 2]
    for row in rows:
        told = record.rounds[int(str(row["round"]))]
        for name in ("test_accuracy", "test_loss", "seconds", "epsilon_max"):
            assert told[name] == row[name]
        assert (told["participants"], told["failed"]) == (2.0, 0.0)
    (tracked,) = record.runs
    assert tracked.settings["privacy.noise_multiplier"] == 1.0
    assert tracked.settings["local.optimizer.lr"] == 0.1
    assert record.finished == 1
    run(tmp_path / "alone")
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_tracker_that_fails_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    tracker = Recording(fails_in=1)
    use(monkeypatch, tracker)
    rows = run(tmp_path / "r", "tensorboard")
    assert len(rows) == 2
    assert (tracker.rounds, tracker.finished) == ({}, 0)
    assert "tracker tensorboard failed and was removed: OSError: disk full" in logged.text


@pytest.mark.parametrize("name", list(tracking.TRACKERS))
def test_one_that_is_not_installed_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(TrackerError, match=rf"pip install 'fedsim-dp\[{name}\]', or leave {name}"):
        run(tmp_path / "r", name)
    assert not (tmp_path / "r").exists()


def test_an_unknown_one_is_a_located_mistake() -> None:
    with pytest.raises(fedsim.ExperimentError, match=r"'tensorbord'; did you mean 'tensorboard'"):
        run_experiment(EXPERIMENT, overrides={"runtime.trackers": ["tensorbord"]})


OWN = """\
import json
from pathlib import Path

class Lines:
    def start(self, run):
        self.path = run.path / "lines.txt"

    def log(self, round_number, metrics):
        with self.path.open("a") as file:
            print(round_number, metrics["test_accuracy"], file=file)

    def finish(self):
        pass

class Watcher:
    def started(self, federation, path):
        self.path = path / "watched.json"
        self.rows = []

    def round_finished(self, row):
        self.rows.append(row)

    def ended(self):
        self.path.write_text(json.dumps(self.rows))

class Ends(Lines):
    def log(self, round_number, metrics):
        raise SystemExit(0)

def needs(argument):
    return Lines()

class Nothing:
    pass
"""


def own(folder: Path, *names: str, out: str = "r") -> fedsim.RunResult:
    (folder / "own.py").write_text(OWN)
    trackers = [f"./own.py:{name}" for name in names]
    return fedsim.run(
        EXPERIMENT, overrides={"runtime.trackers": trackers}, base=folder, out=folder / out
    )


def test_trackers_and_observers_of_ones_own_are_named_by_reference(tmp_path: Path) -> None:
    run = own(tmp_path, "Lines", "Watcher")
    accuracies = [f"{row['round']} {row['test_accuracy']}" for row in run.rounds]
    assert (run.path / "lines.txt").read_text().splitlines() == accuracies
    assert json.loads((run.path / "watched.json").read_text()) == list(run.rounds)
    assert verify_run(RunDirectory(run.path)).problems == ()
    (tmp_path / "own.py").unlink()
    assert replay_run(RunDirectory(run.path), base=tmp_path).problems == ()


def test_a_tracker_of_ones_own_cannot_end_the_run(tmp_path: Path, logged: Any) -> None:
    assert own(tmp_path, "Ends").status == "completed"
    assert "tracker ./own.py:Ends failed and was removed: PluginExitError" in logged.text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Nothing", r"a Nothing, which is neither a tracker \(methods start, log, finish\)"),
        ("needs", "calling it without arguments failed with TypeError"),
        ("Linse", "did you mean Lines"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_runs(
    tmp_path: Path, name: str, hint: str
) -> None:
    with pytest.raises(fedsim.FedsimError, match=hint):
        own(tmp_path, name)
    assert not (tmp_path / "r").exists()


def test_a_missing_file_of_a_tracker_is_a_located_mistake(tmp_path: Path) -> None:
    with pytest.raises(fedsim.ExperimentError, match=r"runtime\.trackers.*: no such file"):
        fedsim.run(EXPERIMENT, overrides={"runtime.trackers": ["./no.py:T"]}, base=tmp_path)


def test_code_of_trackers_is_listed_before_a_run_and_deployed_nowhere(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    overrides = {"runtime.trackers": ["./own.py:Lines"]}
    loaded = load_experiment(EXPERIMENT, overrides, base=tmp_path)
    assert find_footprint(loaded).code == ("./own.py:Lines",)
    assert loaded.experiment.plugins == ()
    with pytest.raises(DeploymentError, match=r"runtime\.trackers=\[\]"):
        write_app(loaded, tmp_path / "app")


def test_the_catalogue_names_every_tracker() -> None:
    assert settings.TRACKERS.keys() == tracking.TRACKERS.keys()


@pytest.mark.slow
def test_tensorboard_shows_the_rounds_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = run(tmp_path / "r", "tensorboard")
    rows = run(tmp_path / "r", "tensorboard", rounds=3, resume=True)
    events = reading.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("test_accuracy")}
    assert shown == pytest.approx({row["round"]: row["test_accuracy"] for row in rows}, rel=1e-6)
    assert len(shown) == 3


def test_a_pattern_in_a_setting_is_no_parameter_that_mlflow_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow.tracking", MagicMock(MlflowClient=lambda **_: client))
    client.create_run.return_value.info.run_id = "7"
    settings = {"privacy.clipping.groups.layers.*.max_grad_norm": 1.0, "a.b_c": 2}
    MlflowTracker().start(TrackedRun("patterns", tmp_path, settings))
    logged = [call.args for call in client.log_param.call_args_list]
    assert logged == [
        ("7", "privacy.clipping.groups.layers._.max_grad_norm", "1.0"),
        ("7", "a.b_c", "2"),
    ]


@pytest.mark.slow
def test_mlflow_has_settings_and_rounds_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = pytest.importorskip("mlflow.tracking")
    run(tmp_path / "r", "mlflow")
    rows = run(tmp_path / "r", "mlflow", rounds=3, resume=True)
    folder = tmp_path / "r" / "mlflow"
    client = tracking.MlflowClient(tracking_uri=(folder / "runs").as_uri())
    run_id = (folder / "run_id.txt").read_text().strip()
    history = client.get_metric_history(run_id, "epsilon_max")
    assert {one.step: one.value for one in history} == {
        row["round"]: row["epsilon_max"] for row in rows
    }
    found = client.get_run(run_id)
    assert found.data.params["privacy.noise_multiplier"] == "1.0"
    assert found.info.status == "FINISHED"
    experiment = client.get_experiment_by_name("fedsim")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no room for a header: the rest of the block is empty
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_keeps_the_rounds_offline_under_one_id(tmp_path: Path) -> None:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    run(tmp_path / "r", "wandb")
    rows = run(tmp_path / "r", "wandb", rounds=3, resume=True)
    kept: dict[int, float] = {}
    ids = set()
    for file in (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb"):
        ids.add(file.stem)
        for data in wandb_records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                kept[record.history.step.num] = values["test_accuracy"]
    assert kept == {row["round"]: row["test_accuracy"] for row in rows}
    assert len(ids) == 1
