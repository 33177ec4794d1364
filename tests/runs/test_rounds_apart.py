"""Runs of whole clients with correlated noise: one charge, the same bits, and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.accountant import Gaussian, PldAccountant
from fedsim.clients.account import PrivacyAccount
from fedsim.clients.mechanisms.plan import Accounting, PrivacyPlanError
from fedsim.clients.mechanisms.planner import calibrate_noise
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.experiment import load_experiment
from fedsim.experiment.errors import ExperimentError
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.noise.correlated.blt import optimised_blt
from fedsim.noise.correlated.run import RunCorrelation
from fedsim.noise.correlated.settings import BltSettings, MinSeparation
from fedsim.planning.projection import plan_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.runs.verification import verify_run
from fedsim.server.aggregation.noisy_sum import NoisySum, ServerNoise
from fedsim.server.participation.schedules import SeparatedSchedule
from fedsim.statement import read_facts
from fedsim.tools.replay import replay_run
from fedsim.tracking.callbacks import RunCallback

EXPERIMENT: dict[str, Any] = {
    "name": "rounds-apart",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 20}},
    # The probe of a larger model needs fewer rounds.
    "model": {"name": "mlp", "args": {"hidden": [50]}},
    "federation": {
        "rounds": 12,
        "clients_per_round": 5,
        "participation": {"scheme": "min_separation", "rounds_apart": 4},
    },
    "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        **{"trust": "central", "unit": "client", "target_epsilon": 8.0, "delta": 1e-2},
        **{"max_update_norm": 0.5, "noise_correlation": {"name": "blt", "buffers": 2}},
    },
}
SAME = ("model.safetensors", "privacy.json", "ledger.jsonl", "releases.jsonl", "experiment.yaml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds-apart") / "whole"
    fedsim.run(EXPERIMENT, out=path)
    return path


def test_a_client_is_charged_once_for_all_its_rounds(whole: Path) -> None:
    rounds: dict[int, list[dict[str, Any]]] = {}
    for line in (whole / "ledger.jsonl").open():
        record = json.loads(line)
        rounds.setdefault(record["client"], []).append(record)
    privacy = json.loads((whole / "privacy.json").read_text())
    recorded = privacy["noise_correlation"]
    assert (recorded["rounds"], recorded["rounds_apart"], recorded["max_rounds"]) == (12, 4, 3)
    for first, *later in rounds.values():
        ((event, count),) = [(entry["event"], entry["count"]) for entry in first["ledger"]]
        assert (event["type"], event["event"]["type"], event["count"], count) == (
            *("SelfComposed", "Gaussian", 1, 1),
        )
        assert [record["round"] for record in later] == [
            first["round"] + 4 * turn for turn in range(1, 1 + len(later))
        ]
        assert all(record["ledger"] == [] for record in later)
        noise = event["event"]["noise_multiplier"]
        row = privacy["clients"][first["client"]]
        assert noise * recorded["sensitivity"] == pytest.approx(row["noise_multiplier"], rel=1e-4)
        assert noise * recorded["sensitivity"] < row["noise_multiplier"]  # the cost of the grid
        oracle = PldAccountant().compose(Gaussian(noise)).get_epsilon(1e-2)
        assert oracle == pytest.approx(8.0, rel=1e-3)


def test_the_report_names_the_participation_and_zcdp(whole: Path) -> None:
    privacy = json.loads((whole / "privacy.json").read_text())
    said = {point["id"]: point for point in privacy["statement_points"]}
    text = said["round_correlation"]["text"]
    assert "in at most 3 of 12 rounds" in text
    assert "at least 4 apart" in text
    noise = privacy["clients"][0]["ledger"][0]["event"]["event"]["noise_multiplier"]
    assert f"ρ = {0.5 / noise**2:.4g}" in text
    assert "every_round" not in said  # a round is not charged in full
    for key, value, objection in (
        ("sensitivity", None, "is not recorded"),
        ("sensitivity", 9.9, "claims more noise than"),
        ("max_rounds", 2, "in 3 rounds, and 2 are charged"),
    ):
        forged = {**privacy, "noise_correlation": {**privacy["noise_correlation"], key: value}}
        assert any(objection in text for text in read_facts(forged).objections)
    assert read_facts(privacy).objections == ()
    privacy["clients"][0]["ledger"] = [
        {"event": {"type": "Gaussian", "noise_multiplier": noise}, "count": 3}
    ]
    assert any("as one event" in text for text in read_facts(privacy).objections)


def test_verify_and_plan_know_it_and_verify_finds_other_parameters(whole: Path) -> None:
    assert verify_run(RunDirectory(whole)).problems == ()
    planned = plan_experiment(load_experiment(EXPERIMENT))
    assert planned.refusal is None
    assert (
        planned.system_epsilon == json.loads((whole / "privacy.json").read_text())["system_epsilon"]
    )
    written = (whole / "experiment.yaml").read_text()
    assert "decays" in written  # the run records the parameters that were optimised
    (line,) = (line for line in written.splitlines() if line.strip().startswith("decays:"))
    forged = written.replace(line, line.replace("0.", "0.1", 1))
    try:
        (whole / "experiment.yaml").write_text(forged)
        problems = " ".join(verify_run(RunDirectory(whole)).problems)
    finally:
        (whole / "experiment.yaml").write_text(written)
    assert "noise_correlation" in problems
    assert "noise_multiplier is" in problems


@pytest.mark.slow
@pytest.mark.parametrize("noise", [{"name": "blt", "buffers": 2}, "tree"], ids=["blt", "tree"])
def test_a_resumed_run_has_the_same_bits(
    noise: Any, tmp_path: Path, stop_after: Callable[[int], RunCallback]
) -> None:
    changes = {"privacy.noise_correlation": noise}
    run_experiment(EXPERIMENT, overrides=changes, out=tmp_path / "whole")
    stopped = tmp_path / "stopped"
    run_experiment(EXPERIMENT, overrides=changes, out=stopped, callback=stop_after(7))
    run_experiment(EXPERIMENT, overrides=changes, out=stopped, resume=True)
    for name in SAME:
        assert (stopped / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_round_that_dies_after_its_noise_was_drawn_has_the_same_bits(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, calls = NoisySum._mean_model, list[int]()

    def power_cut(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return mean(*arguments)

    monkeypatch.setattr(NoisySum, "_mean_model", power_cut)
    assert run_experiment(EXPERIMENT, out=tmp_path / "cut").status == "interrupted"
    monkeypatch.setattr(NoisySum, "_mean_model", mean)
    run_experiment(EXPERIMENT, out=tmp_path / "cut", resume=True)
    for name in SAME:
        assert (tmp_path / "cut" / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_client_that_fails_waits_for_its_next_turn(tmp_path: Path) -> None:
    """Its charge stays, the divisor too, and a round that nobody answers releases its noise."""
    faults = [{"kind": "error", "probability": 0.5}]
    changes = {"faults": faults, "federation.min_participants": 0}
    run_experiment(EXPERIMENT, overrides=changes, out=tmp_path / "run")
    assert verify_run(RunDirectory(tmp_path / "run")).problems == ()
    turns: dict[int, list[int]] = {}
    for line in (tmp_path / "run" / "rounds.jsonl").open():
        row = json.loads(line)
        for client in [*row["participants"], *(failure["client"] for failure in row["failed"])]:
            turns.setdefault(client, []).append(row["round"])
        assert row["update_norm"] > 0.0
    assert all(
        later - earlier == 4 for rounds in turns.values() for earlier, later in pairwise(rounds)
    )
    assert sum(map(len, turns.values())) == 60


@pytest.mark.parametrize("name", ["blt", "tree"])
def test_a_round_that_is_given_up_keeps_the_noise_that_later_rounds_cancel(
    tmp_path: Path, name: str
) -> None:
    """With updates of 0 a model is its noise: as much as planned, whichever rounds are opened."""
    common = {
        "local.optimizer.lr": 1e-9,
        "federation.min_participants": 0,
        "privacy.noise_correlation": {"name": name},
        "secure_aggregation": {"min_clients": 5, "on_abort": "skip_round"},
    }
    dropped = {"kind": "dropout_after", "clients": [*range(0, 20, 2)], "rounds": [4, 8]}
    models = dict[str, Any]()
    for run, faults in (("all", []), ("two given up", [dropped])):
        result = run_experiment(
            EXPERIMENT, overrides={**common, "faults": faults}, out=tmp_path / run
        )
        given_up = [row["round"] for row in result.rounds if row["secure_aggregation"]["aborted"]]
        assert given_up == ([4, 8] if faults else [])
        models[run] = result.model().state_dict()
    assert verify_run(RunDirectory(tmp_path / "two given up")).problems == ()
    assert replay_run(RunDirectory(tmp_path / "two given up")).problems == ()
    for key, value in models["all"].items():
        assert torch.allclose(models["two given up"][key], value, atol=1e-5)


def test_a_client_that_is_asked_one_round_too_early_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a schedule in which the turn of round 5 comes in round 4."""
    in_round, swapped = SeparatedSchedule.in_round, {4: 5, 5: 4}

    def early(schedule: SeparatedSchedule, round_number: int) -> tuple[int, ...]:
        return in_round(schedule, swapped.get(round_number, round_number))

    monkeypatch.setattr(SeparatedSchedule, "in_round", early)
    with pytest.raises(RunFailedError, match="rounds that are at least 4 apart"):
        run_experiment(EXPERIMENT, out=tmp_path / "run")
    monkeypatch.setattr(PrivacyAccount, "_refuse_other_run", lambda *_: None)
    run_experiment(EXPERIMENT, out=tmp_path / "unrefused")
    problems = verify_run(RunDirectory(tmp_path / "unrefused")).problems
    assert len(problems) == 10, problems  # five clients came early, and five late before round 8
    assert "client" in problems[0]
    assert "at least 4 apart" in problems[0]


@pytest.mark.usefixtures("whole_probe")
def test_noise_that_is_not_correlated_as_charged_never_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    probe_mechanisms(federation)
    source = ServerNoise.source

    def weaker(noise: ServerNoise, round_number: int) -> Any:
        return source(replace(noise, strategy=None), 1 + round_number // 2)

    monkeypatch.setattr(ServerNoise, "source", weaker)
    with pytest.raises(MechanismMismatchError):
        probe_mechanisms(federation)


def test_a_round_without_updates_still_releases_its_noise() -> None:
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    assert federation.plan.sums is not None
    assert federation.plan.sums.divisor == 5.0  # public: the noise of rounds cancels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy.trust": "local"}, "is not its own; use trust: central"),
        (
            {
                "privacy.trust": {"name": "distributed", "colluding_clients": 1},
                "secure_aggregation": {"protocol": "additive", "min_clients": 4},
            },
            "takes its share along",
        ),
        ({"federation.participation": {"scheme": "poisson"}}, "does not keep the rounds"),
        ({"federation.participation": {"scheme": "uniform"}}, "use participation: min_separation"),
        ({"federation.participation.rounds_apart": 5}, "must be at most 4, as 20 clients"),
        ({"privacy.noise": "secure"}, "set noise: seeded"),
        ({"privacy.clipping": "adaptive"}, "set clipping: flat"),
        ({"privacy.noise_correlation.scales": [0.5, 0.1]}, "give both, or leave both out"),
        (
            {"privacy.unit": "example", "privacy.max_update_norm": None},
            "blt has no guarantee with unit: example",
        ),
    ],
)
def test_what_is_not_proven_is_refused_with_its_reason(
    changes: dict[str, Any], message: str
) -> None:
    if changes.get("privacy.unit") == "example":
        changes = {**changes, "privacy.max_grad_norm": 1.0}
    with pytest.raises(ExperimentError) as error:
        load_experiment(EXPERIMENT, overrides=changes)
    assert message in str(error.value)


def test_the_momentum_of_the_server_decides_the_parameters() -> None:
    for strategy, momentum in (("fedavg", 0.0), ({"name": "fedavgm", "momentum": 0.8}, 0.8)):
        loaded = load_experiment(EXPERIMENT, overrides={"federation.strategy": strategy})
        assert loaded.experiment.privacy is not None
        noise = loaded.experiment.privacy.noise_correlation
        best = optimised_blt(2, MinSeparation.of(12, 4), momentum)
        assert isinstance(noise, BltSettings)
        assert (tuple(noise.scales or ()), tuple(noise.decays or ())) == (best.scales, best.decays)


def test_every_kind_is_charged_for_the_same_epsilon_by_its_own_sensitivity() -> None:
    noises, once = set[float](), Accounting(delta=1e-2)
    needed = calibrate_noise(PoissonSampling(1.0), 1, target_epsilon=8.0, accounting=once)
    for noise in ("identity", "tree", {"name": "toeplitz", "bands": 4}, {"name": "blt"}):
        loaded = load_experiment(EXPERIMENT, overrides={"privacy.noise_correlation": noise})
        plan = next(iter(assemble(loaded, ledger=None).plan.clients or ()))
        assert isinstance(plan.release.correlation, RunCorrelation)
        assert plan.release.effective_noise_multiplier == pytest.approx(needed, rel=1e-9)
        noises.add(plan.noise_multiplier)
    assert len(noises) == 4


TO_RHO: dict[str, Any] = {
    "privacy.target_epsilon": None,
    "privacy.accountant": {"name": "pld", "target_rho": 0.5},
}
LOCAL = {
    **{"privacy.trust": "local", "privacy.noise_correlation": "none"},
    "federation.participation": {"scheme": "uniform"},
}
OF_EXAMPLES = {
    **{**LOCAL, "privacy.unit": "example"},
    **{"privacy.max_update_norm": None, "privacy.max_grad_norm": 1.0},
}


def test_a_run_calibrated_to_rho_spends_it_by_its_ledger_and_verify_finds_less_noise(
    tmp_path: Path,
) -> None:
    fedsim.run(EXPERIMENT, overrides=TO_RHO, out=tmp_path / "run")
    privacy = json.loads((tmp_path / "run" / "privacy.json").read_text())
    for row in privacy["clients"]:  # all k rounds are one Gaussian release: ρ = 1 / (2 z²)
        noise = row["ledger"][0]["event"]["event"]["noise_multiplier"]
        assert 0.5 / noise**2 <= 0.5
        assert noise == pytest.approx(1.0, rel=1e-9)
    said = {point["id"]: point["values"] for point in privacy["statement_points"]}
    assert said["concentrated"] == {"rho": pytest.approx(0.5), "target_rho": 0.5}
    assert verify_run(RunDirectory(tmp_path / "run")).problems == ()
    forged = {**privacy, "target_rho": 0.49}
    assert any("has a ρ above its target" in text for text in read_facts(forged).objections)
    written = (tmp_path / "run" / "experiment.yaml").read_text()
    smaller = written.replace("target_rho: 0.5", "target_rho: 0.25")
    (tmp_path / "run" / "experiment.yaml").write_text(smaller)
    problems = " ".join(verify_run(RunDirectory(tmp_path / "run")).problems)
    assert "target_rho" in problems
    assert "noise_multiplier is" in problems


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy.noise_correlation": "tree"},
        {"privacy.noise_correlation": "none"},
        {"privacy.adjacency": "replace_one"},
        LOCAL,
        {**OF_EXAMPLES, "local.batch_size": "full"},
        {**OF_EXAMPLES, "privacy.sampling": "shuffle"},
    ],
    ids=["tree", "independent", "replace_one", "local", "full batches", "shuffled epochs"],
)
def test_every_release_without_sampling_is_planned_for_its_rho(changes: dict[str, Any]) -> None:
    planned = plan_experiment(load_experiment(EXPERIMENT, overrides={**TO_RHO, **changes}))
    assert 0.5 * (1 - 1e-9) <= (planned.rho or 0.0) <= 0.5
    exact = PldAccountant().compose(Gaussian(1.0)).get_epsilon(1e-2)
    assert planned.system_epsilon == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "federation.participation": {"scheme": "poisson"},
            "privacy.noise_correlation": "none",
        },
        OF_EXAMPLES,
    ],
    ids=["clients drawn", "batches drawn"],
)
def test_a_rho_that_sampling_does_not_lower_is_refused(changes: dict[str, Any]) -> None:
    loaded = load_experiment(EXPERIMENT, overrides={**TO_RHO, **changes})
    with pytest.raises(PrivacyPlanError, match="target_rho cannot be met: sampling lowers ε and"):
        assemble(loaded, ledger=None)


@pytest.mark.parametrize(
    "other",
    [
        {"privacy.target_epsilon": 3.0},
        {"privacy.noise_multiplier": 2.0},
        {"privacy.clients": {"3": {"target_epsilon": 2.0}}},
    ],
)
def test_two_sources_of_noise_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match=r"accountant\.target_rho sets the noise of all"):
        load_experiment(EXPERIMENT, overrides={**TO_RHO, **other})
