"""Every fault of a client has one outcome, with and without privacy, on every engine."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsim
from fedsim.accountant import PrivacyLedger
from fedsim.accountant.ledger.journal import FileJournal, total_of
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.runs.verification import verify_run

ROUND, ROUNDS, STEPS = 2, 3, 2
# kind: (reason in rounds.jsonl, whether the round stays charged); None: the client takes part
OUTCOMES: dict[str, tuple[str | None, bool]] = {
    "dropout_before": ("dropped out before training (injected)", False),
    "dropout_during": ("dropped out during training (injected)", True),
    "dropout_after": ("dropped out after training (injected)", True),
    "error": ("raised an error in training (injected)", True),
    "nan": ("array '1.weight' has NaN or infinite values", True),
    "inf": ("array '1.weight' has NaN or infinite values", True),
    "wrong_shape": ("array '1.weight' must be float32[10, 64], got float32[10, 64, 1]", True),
    "empty": ("has no examples (injected)", False),
    "late": ("answered after 8 s, past the deadline of 5 s", True),
    "in_time": (None, True),
}
KINDS = list(OUTCOMES)
WELL = len(KINDS)  # the first client that nothing happens to
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}


def fault(kind: str, **settings: Any) -> dict[str, Any]:
    delays = {"late": 8.0, "in_time": 3.0}
    if kind in delays:
        return {"kind": "straggler", "delay": delays[kind], **settings}
    return {"kind": kind, **settings}


def experiment(*, private: bool, engine: str = "local", **overrides: Any) -> dict[str, Any]:
    return {
        "name": "faults",
        "seed": 5,
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": WELL + 2}},
        "model": {"name": "logistic"},
        "federation": {"rounds": ROUNDS, "deadline": 5.0},
        "local": {"steps": STEPS, "batch_size": 16},
        "privacy": PRIVACY if private else None,
        "faults": [
            fault(kind, clients=[client], rounds=[ROUND]) for client, kind in enumerate(KINDS)
        ],
        "runtime": {"engine": engine, "workers": 1 if engine == "local" else 2},
        **overrides,
    }


# Ray takes seconds to start workers, so engines other than the local one run with privacy alone.
ON_RAY = [pytest.param(engine, True, marks=pytest.mark.slow) for engine in ("flower", "ray")]
ENGINES = pytest.mark.parametrize(
    ("engine", "private"), [("local", True), ("local", False), *ON_RAY]
)
Runs = Callable[[str, bool], fedsim.RunResult]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """One run with all faults for each engine, with and without privacy."""
    base = tmp_path_factory.mktemp("faults")

    @cache
    def run(engine: str, private: bool) -> fedsim.RunResult:
        if engine != "local":
            request.getfixturevalue("shared_ray")
        settings = experiment(private=private, engine=engine)
        return run_experiment(settings, out=base / f"{engine}-{private}")

    return run


@pytest.mark.parametrize("kind", KINDS)
@ENGINES
def test_the_fault_matrix(run_of: Runs, kind: str, private: bool, engine: str) -> None:
    """The reason is in rounds.jsonl, the update is left out, and the charge stays where it was."""
    result, client = run_of(engine, private), KINDS.index(kind)
    reason, charged = OUTCOMES[kind]
    rows = [json.loads(line) for line in (result.path / "rounds.jsonl").read_text().splitlines()]
    told = {one["client"]: one["reason"] for one in rows[ROUND - 1]["failed"]}
    assert told.get(client) == reason
    assert (client in rows[ROUND - 1]["participants"]) == (reason is None)
    for row in (rows[0], rows[2]):  # before and after, everybody is there
        assert row["failed"] == []
        assert row["participants"] == list(range(WELL + 2))
    if not private:
        return
    spends = {row["client"]: row for row in json.loads(_text(result, "privacy.json"))["clients"]}
    rounds = ROUNDS if charged else ROUNDS - 1
    assert (spends[client]["rounds"], spends[client]["steps"]) == (rounds, rounds * STEPS)
    assert spends[client]["sampling_rate"] == 16 / spends[client]["examples"]
    (entry,) = spends[client]["ledger"]
    assert entry["event"]["sampling_rate"] == 16 / spends[client]["examples"]
    noise, other = (e["event"]["event"] for e in (entry, *spends[WELL]["ledger"]))
    assert noise["type"] == other["type"] == "Gaussian"
    assert noise["noise_multiplier"] == pytest.approx(other["noise_multiplier"], rel=1e-9)
    history = FileJournal(result.path / "ledger.jsonl").history(client)
    assert [charge.round_number for charge in history] == ([1, 2, 3] if charged else [1, 3])
    assert total_of(history) == PrivacyLedger.from_list(spends[client]["ledger"])


@pytest.mark.parametrize(("engine", "private"), ON_RAY)
def test_faults_end_the_same_on_every_engine(
    run_of: Runs, private: bool, engine: str, assert_close_runs: Callable[[Path, Path], None]
) -> None:
    """Within rounding on Flower's runtime, where each client trains alone."""
    one, other = run_of("local", private).path, run_of(engine, private).path
    assert_close_runs(one, other)
    assert (one / "clients.csv").read_bytes() == (other / "clients.csv").read_bytes()
    if engine == "ray":
        for name in ("model.safetensors", "privacy.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes()


@ENGINES
def test_a_run_with_faults_is_sound(run_of: Runs, private: bool, engine: str) -> None:
    assert verify_run(RunDirectory(run_of(engine, private).path)).problems == ()


@pytest.mark.parametrize(("private", "weighting"), [(True, "examples"), (False, "uniform")])
def test_a_failed_client_does_not_change_the_weights_of_the_others(
    tmp_path: Path, private: bool, weighting: str
) -> None:
    """The mean of three clients of which one fails, is the mean of the two others' own updates."""
    settings: dict[str, Any] = {
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "quantity", "num_clients": 3, "min_examples": 100},
        },
        "federation": {"rounds": 1, "weighting": weighting},
    }

    def model(name: str, failing: list[int]) -> dict[str, np.ndarray]:
        faults = [{"kind": "dropout_after", "clients": failing}]
        run = run_experiment(
            experiment(private=private, **settings, faults=faults), out=tmp_path / name
        )
        return load_file(run.path / "model.safetensors")

    loaded = load_experiment(experiment(private=private, **settings, faults=[]))
    sizes = assemble(loaded, ledger=None).data.clients.sizes
    first, second, both = model("a", [1, 2]), model("b", [0, 2]), model("ab", [2])
    a, b = (sizes[0], sizes[1]) if weighting == "examples" else (1, 1)
    assert sizes[0] != sizes[1]
    for name in both:
        expected = (a * first[name].astype(float) + b * second[name]) / (a + b)
        np.testing.assert_allclose(both[name], expected, rtol=0, atol=1e-7)


def test_a_round_that_all_clients_fail_ends_the_run_with_a_report(tmp_path: Path) -> None:
    faults = [{"kind": "dropout_during", "rounds": [2]}]
    with pytest.raises(
        RunFailedError, match=r"every client failed \(12\).*dropped out during"
    ) as caught:
        fedsim.run(experiment(private=True, faults=faults), out=tmp_path / "r")
    result = caught.value.result
    summary = json.loads(_text(result, "summary.json"))
    assert (summary["status"], summary["rounds"], len(result.rounds)) == ("failed", 1, 2)
    assert len(result.rounds[1]["failed"]) == 12
    assert result.rounds[1]["test_loss"] == result.rounds[0]["test_loss"]
    assert result.privacy is not None
    assert {spend.steps for spend in result.privacy.clients} == {2 * STEPS}  # spent for nothing
    assert (result.path / "report.html").is_file()


def test_a_failed_round_is_tried_again_by_resume(tmp_path: Path) -> None:
    """Charged in the first attempt, so that the second one costs nothing."""
    whole = run_experiment(experiment(private=True, faults=[]), out=tmp_path / "whole")
    faults = experiment(private=True, faults=[{"kind": "dropout_after", "rounds": [2]}])
    with pytest.raises(RunFailedError):
        run_experiment(faults, out=tmp_path / "r")
    file = tmp_path / "r" / "experiment.yaml"
    text = file.read_text().replace("rounds: [2]", "rounds: [9]")  # the fault was mended
    file.write_text(text)
    (tmp_path / "r" / "manifest.json").unlink()  # it would show the changed file
    mended = experiment(private=True, faults=[{"kind": "dropout_after", "rounds": [9]}])
    result = run_experiment(mended, out=tmp_path / "r", resume=True)
    for name in ("model.safetensors", "ledger.jsonl", "privacy.json"):
        assert (result.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_rounds_without_participants_can_be_allowed(tmp_path: Path) -> None:
    federation = {"rounds": 3, "min_participants": 0}
    faults = [{"kind": "dropout_before", "rounds": [2]}]
    result = run_experiment(
        experiment(private=True, federation=federation, faults=faults), out=tmp_path / "r"
    )
    assert (result.status, [len(row["participants"]) for row in result.rounds]) == (
        "completed",
        [12, 0, 12],
    )


def test_what_lost_answers_have_cost_counts_at_once(tmp_path: Path) -> None:
    """A round's largest ε has every charge in it, also of a client that was never heard of."""
    privacy = {**PRIVACY, "clients": {"3": {"noise_multiplier": 0.6}}}
    lost = [fault("dropout_after", clients=[3])]
    result = run_experiment(
        experiment(private=True, privacy=privacy, faults=lost), out=tmp_path / "r"
    )
    total = PrivacyLedger()
    for charge, row in zip(
        FileJournal(tmp_path / "r" / "ledger.jsonl").history(3), result.rounds, strict=True
    ):
        assert 3 not in row["participants"]
        total.merge(charge.ledger)
        assert row["epsilon_max"] == total.epsilon_with_slack(1e-3, accountant="pld")


def test_too_few_participants_end_the_run(tmp_path: Path) -> None:
    federation = {"rounds": 3, "min_participants": 10}
    faults = [{"kind": "nan", "rounds": [3], "clients": [0, 4, 7]}]
    with pytest.raises(RunFailedError, match="round 3: 3 clients failed and 9 of at least 10"):
        run_experiment(
            experiment(private=False, federation=federation, faults=faults), out=tmp_path / "r"
        )


@pytest.mark.parametrize("private", [True, False])
def test_a_really_empty_partition_fails_by_name_and_is_never_charged(
    tmp_path: Path, private: bool
) -> None:
    result = run_experiment(_with_empty_clients(private), out=tmp_path / "r")
    empty = [one["client"] for one in result.rounds[0]["failed"]]
    assert 0 < len(empty) < 16
    assert {one["reason"] for row in result.rounds for one in row["failed"]} == {"has no examples"}
    assert not set(empty) & set(result.rounds[0]["participants"])
    if result.privacy is not None:
        assert {spend.steps for spend in result.privacy.clients if spend.client in empty} == {0}
        assert {spend.epsilon for spend in result.privacy.clients if spend.client in empty} == {0.0}


def test_where_sizes_are_private_an_empty_client_behaves_like_any_other(tmp_path: Path) -> None:
    settings = _with_empty_clients(True)
    settings["privacy"] = {**PRIVACY, "adjacency": {"name": "add_remove", "declared_examples": 60}}
    result = run_experiment(settings, out=tmp_path / "r")
    assert all(row["failed"] == [] for row in result.rounds)
    assert result.privacy is not None
    assert len({(s.epsilon, s.examples, s.steps) for s in result.privacy.clients}) == 1


def _with_empty_clients(private: bool) -> dict[str, Any]:
    partition = {"scheme": "dirichlet", "num_clients": 16, "alpha": 0.02, "min_examples": 0}
    data = {"dataset": "digits", "partition": partition}
    return experiment(private=private, data=data, faults=[], federation={"rounds": 2})


def _text(result: fedsim.RunResult, name: str) -> str:
    return (result.path / name).read_text()
