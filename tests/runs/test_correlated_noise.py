"""Runs with correlated noise: one charge, the same bits however they are run, or a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from safetensors.numpy import load_file

import fedsim
from fedsim.clients import client_round
from fedsim.clients.app import BatchClientApp
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.experiment import load_experiment
from fedsim.experiment.errors import ExperimentError
from fedsim.federation.assembly import assemble
from fedsim.planning.projection import plan_experiment
from fedsim.protocol.arrays import to_arrays
from fedsim.protocol.errors import NOISE_REUSE
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainReply, TrainRequest
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.resume import refuse_changes
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.statement import read_facts
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.replay import replay_run
from fedsim.tracking.callbacks import RunCallback

EXPERIMENT: dict[str, Any] = {
    "name": "correlated",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 5, "clients_per_round": 3},
    "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        **{"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
        **{"sampling": "cyclic_poisson", "noise_correlation": {"name": "toeplitz", "bands": 3}},
    },
}
SAME = ("model.safetensors", "privacy.json", "ledger.jsonl", "releases.jsonl")


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").open()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("correlated") / "whole"
    fedsim.run(EXPERIMENT, out=path)
    return path


def test_the_run_is_one_event_before_its_first_release(whole: Path) -> None:
    rounds: dict[int, list[dict[str, Any]]] = {}
    for record in records(whole):
        rounds.setdefault(record["client"], []).append(record)
    for first, *later in rounds.values():
        ((event, count),) = [(entry["event"], entry["count"]) for entry in first["ledger"]]
        assert (event["type"], count) == ("SelfComposed", 1)
        assert event["event"]["type"] == "PoissonSampled"
        assert event["count"] == -(-2 * (1 + len(later)) // 3)
        assert all(record["ledger"] == [] for record in later)
    privacy = json.loads((whole / "privacy.json").read_text())
    assert privacy["noise_correlation"] == {"name": "toeplitz", "bands": 3}
    assert 7.9 < privacy["system_epsilon"] <= 8.0
    said = {point["id"]: point["text"] for point in privacy["statement_points"]}
    assert "with 3 bands" in said["correlation"]


def test_verify_replay_plan_and_the_script_know_it(whole: Path) -> None:
    assert verify_run(RunDirectory(whole)).problems == ()
    assert replay_run(RunDirectory(whole)).problems == ()
    planned = plan_experiment(load_experiment(EXPERIMENT))
    assert planned.refusal is None
    found = json.loads((whole / "privacy.json").read_text())
    assert planned.system_epsilon == found["system_epsilon"]
    for client in planned.clients:
        assert client.affordable_rounds == client.rounds
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert "dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(" in page


def test_a_ledger_without_the_event_is_found(whole: Path, tmp_path: Path) -> None:
    """The statement, too, refuses an ε of noise that was charged step by step."""
    privacy = json.loads((whole / "privacy.json").read_text())
    assert read_facts(privacy).objections == ()
    step = privacy["clients"][0]["ledger"][0]["event"]["event"]
    privacy["clients"][0]["ledger"] = [{"event": step, "count": 3}]
    assert any("as one event" in each for each in read_facts(privacy).objections)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(
    whole: Path, stop_after: Callable[[int], RunCallback], tmp_path: Path
) -> None:
    out = tmp_path / "stopped"
    assert run_experiment(EXPERIMENT, out=out, callback=stop_after(3)).status == "interrupted"
    run_experiment(EXPERIMENT, out=out, resume=True)
    for name in SAME:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


ALONE = {"local.vectorized_clients": "off"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, whose clients train one by one."""
    out = tmp_path_factory.mktemp("correlated") / "alone"
    return run_experiment(EXPERIMENT, overrides=ALONE, out=out).path


@pytest.mark.slow
def test_a_round_that_a_crash_cut_off_has_the_same_bits(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, calls = client_round.block_of, []

    def power_cut(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[-1])
        if len(calls) == 8:  # in the middle of round 3, after all were charged
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(client_round, "block_of", power_cut)
    assert run_experiment(EXPERIMENT, overrides=ALONE, out=tmp_path / "cut").status == "interrupted"
    monkeypatch.setattr(client_round, "block_of", train)
    run_experiment(EXPERIMENT, overrides=ALONE, out=tmp_path / "cut", resume=True)
    for name in SAME:
        assert (tmp_path / "cut" / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.slow
def test_blocks_change_rounding_only(
    whole: Path, alone: Path, assert_close_runs: Callable[[Path, Path], None]
) -> None:
    assert_close_runs(whole, alone)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_ray_workers_have_the_same_bits(whole: Path, tmp_path: Path) -> None:
    workers = {"runtime.engine": "ray", "runtime.workers": 2}
    run_experiment(EXPERIMENT, overrides=workers, out=tmp_path / "ray")
    one, other = (load_file(run / "model.safetensors") for run in (whole, tmp_path / "ray"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def answer(base: Path, arrays: ArrayRecord | None = None, **overrides: Any) -> Message:
    """Ask client 0 for round 1; its state is lost, so the ledger alone remembers."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    loaded = load_experiment(EXPERIMENT, overrides=changes)
    federation = assemble(loaded, ledger=base / "ledger.jsonl")
    start = federation.initial_arrays() if arrays is None else arrays
    with server_identity(1):
        message = TrainRequest(1, start).to_message(7)
        app = BatchClientApp(federation.client_task)
        return app(message, Context(1, 7, {"partition-id": 0}, RecordDict(), {}))


def test_no_two_answers_share_noise(tmp_path: Path) -> None:
    first, again = (TrainReply.from_message(answer(tmp_path)) for _ in range(2))
    arrays = [reply.arrays for reply in (first, again)]
    for name, value in arrays[0].items():
        assert np.array_equal(value, arrays[1][name])  # the same bits
    other = to_arrays({name: value * np.float32(0.5) for name, value in arrays[0].items()})
    refused = answer(tmp_path, other)
    assert refused.error.code == NOISE_REUSE
    assert len(records(tmp_path)) == 1


def test_an_account_of_another_plan_goes_no_further(tmp_path: Path) -> None:
    """More rounds would be steps that nobody charged."""
    for rounds, is_refused in ((5, False), (7, True)):
        given = {"privacy.noise_multiplier": 1.0, "federation.rounds": rounds}
        given |= {"privacy.target_epsilon": None, "federation.clients_per_round": 4}
        federation = assemble(
            load_experiment(EXPERIMENT, overrides=given), ledger=tmp_path / "ledger.jsonl"
        )
        with server_identity(1):
            message = TrainRequest(rounds - 4, federation.initial_arrays()).to_message(7)
            app = BatchClientApp(federation.client_task)
            reply = app(message, Context(1, 7, {"partition-id": 0}, RecordDict(), {}))
        assert reply.has_error() == is_refused
    assert "charged for all steps of a run with correlated noise" in str(reply.error.reason)
    assert len(records(tmp_path)) == 1


def test_rounds_cannot_grow() -> None:
    given = {"privacy.noise_multiplier": 1.5, "privacy.target_epsilon": None}
    before, after = (
        load_experiment(EXPERIMENT, overrides={**given, "federation.rounds": rounds}).experiment
        for rounds in (5, 7)
    )
    with pytest.raises(RunDirectoryError, match="noise_correlation charged each client"):
        refuse_changes(before, after)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("sampling", "poisson", "set sampling: cyclic or cyclic_poisson"),
        ("sampling", "balls_and_bins", "at least `bands` steps apart"),
        ("noise", "secure", "set noise: seeded"),
        ("adjacency", "replace_one", "set adjacency: zero_out"),
        ("clipping", "adaptive", "set clipping: flat or per_layer or automatic"),
        ("on_exhausted", "withdraw", "set on_exhausted: refuse"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(key: str, value: str, fix: str) -> None:
    with pytest.raises(ExperimentError, match="noise_correlation has no guarantee with") as error:
        load_experiment(EXPERIMENT, overrides={f"privacy.{key}": value})
    assert fix in str(error.value)


def test_a_client_that_is_too_small_for_the_bands_is_refused() -> None:
    loaded = load_experiment(EXPERIMENT, overrides={"privacy.noise_correlation.bands": 40})
    with pytest.raises(PrivacyPlanError, match="at most 22 groups"):
        assemble(loaded, ledger=None)


def test_an_audit_is_refused_with_the_fix() -> None:
    with pytest.raises(PrivacyPlanError, match=r"privacy\.noise_correlation=none"):
        audit_experiment(load_experiment(EXPERIMENT))


@pytest.mark.slow
def test_sums_lower_no_figure(tmp_path: Path) -> None:
    secure = {"secure_aggregation": {"protocol": "additive", "aggregators": 2}, "local.steps": 1}
    run_experiment(EXPERIMENT, overrides=secure, out=tmp_path / "r")
    privacy = json.loads((tmp_path / "r" / "privacy.json").read_text())
    assert [one["against"] for one in privacy["certificates"]] == ["server"]
    assert verify_run(RunDirectory(tmp_path / "r")).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["cyclic", "cyclic_poisson"])
def test_cyclic_batches_work_without_correlation(sampling: str, tmp_path: Path) -> None:
    white = {"privacy.noise_correlation": "none", "privacy.sampling": sampling}
    run_experiment(EXPERIMENT, overrides=white, out=tmp_path / "r")
    assert verify_run(RunDirectory(tmp_path / "r")).problems == ()
    assert "noise_correlation" not in json.loads((tmp_path / "r" / "privacy.json").read_text())
