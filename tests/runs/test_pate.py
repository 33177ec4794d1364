"""`task: pate`: a run, its ledger, its check, its replay, its resume, and what verify finds."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.accountant import Gaussian
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.mechanisms.votes.mechanism import VoteMechanism
from fedsim.clients.training.member import StreamKey
from fedsim.experiment import load_experiment
from fedsim.experiment.errors import ExperimentError
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.federation.voting import Voting
from fedsim.noise.sources import SeededNoise
from fedsim.report.contents import read_contents
from fedsim.report.html import render_report
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.policy import NodePolicy
from fedsim.tools.deployment.policy_rules import PolicyRefusalError, check_experiment
from fedsim.tools.deployment.private_files import DeploymentError
from fedsim.tools.replay import replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "votes",
    "task": "pate",
    "data": {
        "dataset": "digits",
        "test_fraction": 0.3,
        "partition": {"scheme": "iid", "num_clients": 12},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 4},
    "local": {"steps": 15, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 1.0}},
    "privacy": {"unit": "client", "trust": "central", "target_epsilon": 40.0, "delta": 1e-2},
    "pate": {
        "queries": 60,
        "answers": 40,
        "threshold": 0.3,
        "sigma_threshold": 6.0,
        "sigma": 3.0,
        "student": {"steps": 20},
    },
}
SUMS = {
    "privacy.trust": "distributed",
    "privacy.trust.fallback_epsilon": 150.0,
    "secure_aggregation": {"protocol": "additive", "min_clients": 8},
}


def run(path: Path, **options: Any) -> Path:
    return run_experiment(EXPERIMENT, out=path, **options).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("votes") / "whole")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def test_each_query_is_charged_and_the_student_is_the_model(whole: Path) -> None:
    path = whole
    privacy = json.loads((path / "privacy.json").read_text())
    assert (privacy["trust"], privacy["unit"]) == ("central", "client")
    assert 39.0 < privacy["system_epsilon"] <= 40.0
    z = privacy["clients"][0]["noise_multiplier"]
    journal = FileJournal(path / "ledger.jsonl")
    for client in range(12):
        charges = journal.history(client)
        assert [charge.round_number for charge in charges] == [1, 2, 3, 4]
        for charge in charges:
            [(event, count)] = charge.ledger.entries
            sigma, queries = (6.0, 30) if charge.round_number % 2 else (3.0, 20)
            assert isinstance(event, Gaussian)
            assert count == queries
            assert event.noise_multiplier == pytest.approx(z * sigma / math.sqrt(2.0), rel=1e-12)
    answers = json.loads((path / "answers.json").read_text())
    last = rows_of(path)[-1]
    assert answers["queries_checked"] == last["queries_checked"] == 60
    assert 0 < answers["queries_answered"] == last["queries_answered"] <= 40
    assert last["test_accuracy"] == json.loads((path / "summary.json").read_text())["test_accuracy"]
    model = load_file(path / "model.safetensors")
    assert {value.shape for value in model.values()} == {(10, 64), (10,)}
    assert "Votes on public queries" in render_report(read_contents(RunDirectory.open(path)))
    directory = RunDirectory.open(path)
    assert verify_run(directory).problems == ()
    replay = replay_run(directory)
    assert (replay.rounds, replay.charges, replay.problems) == (4, 48, ())


def test_a_run_that_was_cut_off_repeats_no_ballot_with_other_noise(
    whole: Path, tmp_path: Path, stop_after
) -> None:
    run(tmp_path / "part", callback=stop_after(1))
    run(tmp_path / "part", resume=True)
    for name in ("ledger.jsonl", "answers.json", "model.safetensors"):
        assert (tmp_path / "part" / name).read_bytes() == (whole / name).read_bytes()


def test_test_scores_leave_the_queries_out() -> None:
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    assert isinstance(federation.goal, Voting)
    queries, test = federation.goal.queries, federation.data.test
    assert len(queries) == 60
    asked = {row.tobytes() for row in queries.features}
    whole = assemble(
        load_experiment(
            {**EXPERIMENT, "pate": {**EXPERIMENT["pate"], "queries": 40, "answers": 40}}
        ),
        ledger=None,
    )
    assert len(whole.data.test) == len(test) + 20
    assert sum(row.tobytes() in asked for row in test.features) == 0


def test_labels_of_queries_change_no_student(tmp_path: Path) -> None:
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    assert isinstance(federation.goal, Voting)
    answers = federation.initial_arrays()
    before = federation.goal.model_of(answers)
    federation.goal.queries.targets[:] = 0
    federation.goal.students.clear()
    after = federation.goal.model_of(answers)
    assert all(np.array_equal(after[name].numpy(), before[name].numpy()) for name in before)


def test_a_client_that_missed_the_check_pays_for_the_vote_alone(tmp_path: Path) -> None:
    faults = [{"kind": "dropout_before", "clients": [3], "rounds": [1]}]
    path = run(tmp_path / "r", overrides={"faults": faults})
    charges = FileJournal(path / "ledger.jsonl").history(3)
    assert [(c.round_number, c.ledger.entries[0][1]) for c in charges] == [
        (2, 20),
        (3, 30),
        (4, 20),
    ]
    assert verify_run(RunDirectory.open(path)).problems == ()


def test_verify_finds_another_label(whole: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "r"))
    content = json.loads((path / "answers.json").read_text())
    answered = next(row for row in content["queries"] if row["label"] is not None)
    answered["label"] = (answered["label"] + 1) % 10
    (path / "answers.json").write_text(json.dumps(content, indent=2))
    problems = verify_run(RunDirectory.open(path)).problems
    assert any("not those of the checkpoint" in problem for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [SUMS, {"privacy.trust": "local"}, {"privacy": None}])
def test_every_trust_model_votes(tmp_path: Path, overrides: dict[str, Any]) -> None:
    path = run(tmp_path / "r", overrides=overrides)
    directory = RunDirectory.open(path)
    assert verify_run(directory).problems == ()
    assert replay_run(directory).problems == ()
    privacy = json.loads((path / "privacy.json").read_text())
    if "secure_aggregation" in overrides:
        row = privacy["clients"][0]
        seen, own = (
            row[name][0]["event"]["noise_multiplier"]
            for name in ("ledger", "ledger_against_server")
        )
        assert seen == pytest.approx(own * math.sqrt(7.0))  # 8 clients, of which 1 may collude
        assert row["epsilon"] <= 40.0
        assert row["epsilon_against_server"] <= 150.0


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_workers_agree(tmp_path: Path) -> None:
    local = run(tmp_path / "local", overrides=SUMS)
    workers = {"runtime.engine": "ray", "runtime.workers": 2}
    other = run(tmp_path / "ray", overrides={**SUMS, **workers})
    for name in ("answers.json", "model.safetensors"):
        assert (local / name).read_bytes() == (other / name).read_bytes()
    assert verify_run(RunDirectory.open(other)).problems == ()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"privacy.unit": "example", "privacy.max_grad_norm": 1.0}, "write unit: client"),
    ({"privacy.adjacency": "replace_one"}, "which covers one that is zeroed out"),
    ({"privacy.noise": "secure"}, "repeats a ballot with the same noise"),
    ({"privacy.max_update_norm": 1.0}, "nothing is clipped"),
    ({"federation.rounds": 3}, "write an even number, got 3"),
    ({"federation.strategy": "fedadam"}, "averages no models"),
    ({"federation.clients_per_round": 5}, "all teachers vote"),
    ({"pate.answers": 61}, "at most pate.queries"),
    ({"pate.answers": 41}, "must be a multiple of 2"),
    ({"pate": None}, "needs the section pate"),
    ({"task": "federated", "privacy.max_update_norm": 1.0}, "belongs to task: pate"),
    ({"model.loss": "mse"}, "needs classes to vote for"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_a_file_without_a_theorem_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load_experiment(EXPERIMENT, overrides)


def test_too_many_queries_for_the_test_set() -> None:
    with pytest.raises(ValueError, match=r"pate\.queries 538 of 539 public test examples"):
        assemble(
            load_experiment(EXPERIMENT, {"pate.queries": 538, "pate.answers": 40}), ledger=None
        )


def test_what_knows_no_votes_refuses_them(tmp_path: Path) -> None:
    loaded = load_experiment(EXPERIMENT)
    with pytest.raises(ValueError, match="fedsim audit plants canaries"):
        audit_experiment(loaded, clients=1, steps=10)
    with pytest.raises(DeploymentError, match="task: pate is for simulations"):
        write_app(loaded, tmp_path / "app")
    with pytest.raises(PolicyRefusalError, match="has no limits for votes"):
        check_experiment(NodePolicy(), loaded)


@pytest.mark.usefixtures("whole_probe")
@pytest.mark.parametrize("trust", [SUMS, {"privacy.trust": "local"}, {}])
@pytest.mark.parametrize("wrong", ["noise", "vote"])
def test_noise_or_votes_that_are_not_charged_never_start(
    monkeypatch: pytest.MonkeyPatch, trust: dict[str, Any], wrong: str
) -> None:
    federation = assemble(load_experiment(EXPERIMENT, trust), ledger=None)
    probe_mechanisms(federation)
    if wrong == "vote":
        larger = VoteMechanism.vote_steps
        monkeypatch.setattr(VoteMechanism, "vote_steps", lambda self, n: 2 * larger(self, n))
    elif trust:
        fill = SeededNoise.fill_
        monkeypatch.setattr(SeededNoise, "fill_", lambda self, v: fill(self, v).mul_(0.5).round_())
    else:
        monkeypatch.setattr(
            "fedsim.clients.training.member.NoNoise", lambda: SeededNoise(bytes(32))
        )  # the client adds noise, too
    with pytest.raises(MechanismMismatchError):
        probe_mechanisms(federation)


@pytest.mark.usefixtures("whole_probe")
@pytest.mark.parametrize(("check", "vote"), [(0.5, 1.4), (1.4, 0.5)])
def test_noise_of_one_ballot_makes_up_for_none_in_the_other(
    monkeypatch: pytest.MonkeyPatch, check: float, vote: float
) -> None:
    """Together the two ballots have more noise than charged; one of them has half of it."""
    federation = assemble(load_experiment(EXPERIMENT, {"privacy.trust": "local"}), ledger=None)
    probe_mechanisms(federation)
    drawn = StreamKey.noise

    def uneven(self: StreamKey, **given: Any) -> Any:
        source, factor = drawn(self, **given), check if self.round_number % 2 else vote
        fill = source.fill_
        monkeypatch.setattr(source, "fill_", lambda values: fill(values).mul_(factor).round_())
        return source

    monkeypatch.setattr(StreamKey, "noise", uneven)
    with pytest.raises(MechanismMismatchError) as caught:
        probe_mechanisms(federation)
    numbers = re.search(r"multiplier is ([\d.]+), and ([\d.]+) is charged", str(caught.value))
    assert numbers is not None
    assert float(numbers[1]) == pytest.approx(0.5 * float(numbers[2]), rel=0.1)
