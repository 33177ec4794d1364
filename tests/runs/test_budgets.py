"""Clients with budgets of their own."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

import fedsim
from fedsim.accountant import PrivacyLedger
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PrivacyBudgetError, PrivacyPlan, delta_of
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.planning.projection import plan_experiment
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

TARGETS = {client: 0.5 + 7.5 * client / 19 for client in range(20)}
EXPERIMENT: dict[str, Any] = {
    "name": "budgets",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 20}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 2, "batch_size": 16},
    "privacy": {
        "target_epsilon": 8.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
        "clients": {str(client): {"target_epsilon": value} for client, value in TARGETS.items()},
    },
}


def recomputed(client: dict[str, Any]) -> float:
    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4
    )
    for entry in client["ledger"]:
        event = dp_accounting.GaussianDpEvent(entry["event"]["event"]["noise_multiplier"])
        sampled = dp_accounting.PoissonSampledDpEvent(entry["event"]["sampling_rate"], event)
        accountant.compose(sampled, entry["count"])
    return accountant.get_epsilon(client["delta"])


def test_no_client_exceeds_its_own_target(tmp_path: Path) -> None:
    """Targets from 0.5 to 8, of which the smallest is recomputed by dp-accounting."""
    targets = dict.fromkeys(range(20), 8.0) | {client: TARGETS[client] for client in (0, 5, 10)}
    own = {str(client): {"target_epsilon": target} for client, target in targets.items()}
    run = run_experiment(EXPERIMENT, overrides={"privacy.clients": own}, out=tmp_path / "r").path
    clients = json.loads((run / "privacy.json").read_text())["clients"]
    for client in clients:
        target = targets[client["client"]]
        assert client["target_epsilon"] == target
        assert target - 1e-2 < client["epsilon"] <= target
    assert recomputed(clients[0]) <= targets[0] + 1e-3
    # Clients of one size need less noise for a larger budget.
    for size in {client["examples"] for client in clients}:
        same = [one for one in clients if one["examples"] == size]
        same.sort(key=lambda one: (one["target_epsilon"], -one["noise_multiplier"]))
        noise = [one["noise_multiplier"] for one in same]
        assert noise == sorted(noise, reverse=True)
    assert verify_run(RunDirectory.open(run)).problems == ()


def plans_of(overrides: dict[str, Any]) -> Sequence[PrivacyPlan]:
    return assemble(load_experiment(EXPERIMENT, overrides), ledger=None).plan.clients or ()


def test_a_client_keeps_what_is_everybodys() -> None:
    own = {"1": {"noise_multiplier": 2.0}, "2": {"delta": 1e-4, "max_grad_norm": 0.1}}
    first, second, third, fourth = plans_of({"privacy.clients": own})[:4]
    assert (second.noise_multiplier, second.target_epsilon) == (2.0, 8.0)
    assert (third.delta, third.target_epsilon) == (1e-4, 8.0)
    assert third.noise_multiplier > first.noise_multiplier
    assert fourth.noise_multiplier == first.noise_multiplier


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"20": {"delta": 1e-4}}, "privacy.clients.20: no such client; use a number from 0 to 19"),
        ({"all": {"delta": 1e-4}}, "'all' is not a client number ('0', '1', ...), so it names"),
        ({"01": {"delta": 1e-4}}, "'01' is not a client number"),
        ({"a": {"share": 0.5, "members": [1]}}, "csv, got members and share"),
        ({"1": {"share": 0.5, "delta": 1e-4}}, "'1' is the number of a client and takes no share"),
        ({"a": {"members": [3, 20]}}, "privacy.clients.a.members.1: no such client"),
        ({"a": {"members": [3, 3]}}, "members names client 3 more than once"),
        ({"a": {"members": []}}, "privacy.clients.a.members: must have at least 1 item"),
        ({"a": {"csv": "b.csv"}}, "csv and columns need each other"),
        (
            {"a": {"csv": "b.csv", "columns": {"delta": "d"}, "delta": 1e-4}},
            "delta comes from a column of the csv file already",
        ),
        (
            {"a": {"csv": "no.csv", "columns": {"delta": "d"}}},
            "privacy.clients.a.csv: no such file",
        ),
        ({"1": {"target_epsilonn": 1.0}}, "did you mean 'target_epsilon'"),
        ({"1": {"delta": 2}}, "privacy.clients.1.delta: must be < 1, got 2"),
    ],
)
def test_impossible_budgets_are_refused(clients: dict[str, Any], message: str) -> None:
    with pytest.raises(fedsim.ExperimentError) as caught:
        load_experiment(EXPERIMENT, {"privacy.clients": clients})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


COMMON_NOISE = {
    "federation.rounds": 8,
    "local.steps": 3,
    "privacy.noise_multiplier": 0.9,
    "privacy.on_exhausted": "withdraw",
}


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> fedsim.RunResult:
    out = tmp_path_factory.mktemp("common") / "r"
    return run_experiment(EXPERIMENT, overrides=COMMON_NOISE, out=out)


def test_clients_withdraw_in_the_round_that_the_plan_predicted(common: fedsim.RunResult) -> None:
    """Targets from 0.5 to 8 under one noise: each client trains as long as its own allows."""
    loaded = load_experiment(EXPERIMENT, COMMON_NOISE)
    predicted = {one.client: one for one in plan_experiment(loaded).clients}
    result = common
    assert result.status == "completed"
    assert result.privacy is not None
    left = 0
    for spend in result.privacy.clients:
        trained = [row["round"] for row in result.rounds if spend.client in row["participants"]]
        plan = predicted[spend.client]
        assert max(trained, default=0) == plan.last_round
        assert (spend.steps, spend.epsilon) == (plan.steps, pytest.approx(plan.epsilon))
        assert spend.epsilon <= TARGETS[spend.client]
        if plan.last_round < 8:
            left += 1
            assert spend.withdrawn_round == plan.last_round + 1
    assert 5 < left < 20
    assert result.privacy.clients[19].steps == 24  # the loosest trains to the end
    partly = {one["client"]: one["steps"] for row in result.rounds for one in row["shortened"]}
    assert set(partly.values()) == {1, 2}
    assert all(predicted[client].steps % 3 == steps for client, steps in partly.items())
    assert verify_run(RunDirectory.open(result.path)).problems == ()


def test_one_step_more_would_exceed_the_target(common: fedsim.RunResult) -> None:
    assert common.privacy is not None
    for spend in common.privacy.clients:
        if spend.withdrawn_round is not None and spend.steps:
            more = spend.ledger.to_list()
            more[0]["count"] += 1
            assert PrivacyLedger.from_list(more).epsilon(spend.delta) > TARGETS[spend.client]


def test_a_withdrawn_client_stays_away_after_a_resume(
    common: fedsim.RunResult, tmp_path: Path
) -> None:
    overrides = {**COMMON_NOISE, "federation.rounds": 4}
    run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "r")
    again = run_experiment(EXPERIMENT, overrides=COMMON_NOISE, out=tmp_path / "r", resume=True)
    for name in ("model.safetensors", "privacy.json", "clients.csv", "ledger.jsonl"):
        assert (again.path / name).read_bytes() == (common.path / name).read_bytes()
    assert [row["withdrawn"] for row in again.rounds] == [row["withdrawn"] for row in common.rounds]


def test_stop_ends_the_run_with_a_complete_report(tmp_path: Path) -> None:
    overrides = {**COMMON_NOISE, "privacy.on_exhausted": "stop", "privacy.clients": {}}
    overrides["privacy.clients"] = {"4": {"target_epsilon": 3.0}}
    result = fedsim.run(EXPERIMENT, overrides=overrides, out=tmp_path / "r")
    summary = json.loads((result.path / "summary.json").read_text())
    assert result.status == summary["status"] == "stopped"
    assert "budget of client 4 is spent" in summary["reason"]
    (withdrawal,) = result.rounds[-1]["withdrawn"]
    assert withdrawal["client"] == 4
    assert "target ε = 3" in withdrawal["reason"]
    assert (result.path / "report.html").is_file()
    assert verify_run(RunDirectory.open(result.path)).problems == ()
    resumed = fedsim.run(EXPERIMENT, overrides=overrides, out=tmp_path / "r", resume=True)
    assert (resumed.status, len(resumed.rounds)) == ("stopped", len(result.rounds))


def test_a_federation_that_everybody_left_stops(tmp_path: Path) -> None:
    overrides = {**COMMON_NOISE, "privacy.target_epsilon": 2.0, "privacy.clients": {}}
    result = run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "r")
    assert (result.status, result.reason) == (
        "stopped",
        "every client has spent its privacy budget",
    )
    assert len(result.rounds[-1]["withdrawn"]) == 20
    assert result.rounds[-1]["test_loss"] == result.rounds[-2]["test_loss"]


def test_a_plan_beyond_the_budget_is_refused_with_the_rounds_that_fit(tmp_path: Path) -> None:
    overrides = {**COMMON_NOISE, "privacy.on_exhausted": "refuse", "privacy.clients": {}}
    overrides["privacy.target_epsilon"] = 4.0
    with pytest.raises(PrivacyBudgetError, match=r"set federation\.rounds=") as caught:
        run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()
    fits = int(re.findall(r"federation\.rounds=(\d+)", str(caught.value))[0])
    overrides["federation.rounds"] = fits + 1
    with pytest.raises(PrivacyBudgetError):
        run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "no")
    overrides["federation.rounds"] = fits
    result = run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "r")
    assert result.privacy is not None
    assert 3.0 < result.privacy.system_epsilon <= 4.0


def test_the_rounds_that_fit_count_the_rounds_a_client_sits_out(tmp_path: Path) -> None:
    overrides = {
        **COMMON_NOISE,
        "federation": {"rounds": 40, "clients_per_round": 4},
        "privacy.on_exhausted": "refuse",
        "privacy.clients": {"3": {"target_epsilon": 3.0}},
    }
    with pytest.raises(PrivacyBudgetError, match=r"client 3 .* target_epsilon is 3") as caught:
        run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "no")
    fits = int(re.findall(r"federation\.rounds=(\d+)", str(caught.value))[0])
    federation = {"rounds": fits, "clients_per_round": 4}
    plan = plan_experiment(load_experiment(EXPERIMENT, {**overrides, "federation": federation}))
    assert plan.refusal is None
    federation = {"rounds": fits + 1, "clients_per_round": 4}
    plan = plan_experiment(load_experiment(EXPERIMENT, {**overrides, "federation": federation}))
    assert plan.refusal is not None


def test_a_refusal_states_the_epsilon_of_the_noise_in_the_sum() -> None:
    """A client's share of the noise is less than what hides it: its ε is that of the sums."""
    common = {**COMMON_NOISE, "privacy.on_exhausted": "refuse", "privacy.clients": {}}
    common |= {"privacy.target_epsilon": 2.0, "local.steps": 1}
    refusals = set[str | None]()
    for trust in ("local", "distributed", "central"):
        secure = {"protocol": "additive", "min_clients": 8} if trust == "distributed" else None
        overrides = {**common, "privacy.trust": trust, "secure_aggregation": secure}
        refusals.add(plan_experiment(load_experiment(EXPERIMENT, overrides)).refusal)
    assert len(refusals) == 1
    assert "would spend ε = " in str(refusals)


@pytest.mark.parametrize("trust", ["distributed", "central"])
def test_budgets_count_the_noise_of_the_sum_that_a_refusal_states(
    tmp_path: Path, trust: str
) -> None:
    """The client with the most noise sets that of the sum, and the noise of the sum hides all."""
    secure = {"protocol": "additive", "min_clients": 20} if trust == "distributed" else None
    overrides = {
        "local.steps": 1,
        "privacy.noise_multiplier": 1.0,
        "privacy.target_epsilon": 1.0,
        "privacy.on_exhausted": "refuse",
        "privacy.clients": {"0": {"noise_multiplier": 4.0}},
        "privacy.trust": trust,
        "secure_aggregation": secure,
    }
    result = run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "r")
    assert result.privacy is not None
    assert result.privacy.system_epsilon <= 1.0
    assert verify_run(RunDirectory.open(result.path)).problems == ()

    overrides["federation.rounds"] = 1000
    with pytest.raises(PrivacyBudgetError, match=r"would spend ε = ") as caught:
        run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "no")
    spent, target, fits = (
        float(re.findall(text, str(caught.value))[0])
        for text in (r"ε = (\S+)", r"target_epsilon is (\d+)", r"rounds=(\d+)")
    )
    assert spent > target
    assert 3 < fits < 1000


def test_a_budget_that_affords_no_step_at_all_is_refused(tmp_path: Path) -> None:
    overrides = {**COMMON_NOISE, "privacy.target_epsilon": 0.01, "privacy.clients": {}}
    with pytest.raises(PrivacyBudgetError, match="no client can take a single step"):
        run_experiment(EXPERIMENT, overrides=overrides, out=tmp_path / "no")


def test_a_target_below_all_noise_names_the_steps_that_fit() -> None:
    overrides = {
        "privacy.clients": {},
        "privacy.target_epsilon": 1e-9,
        "privacy.delta": 1e-9,
        "federation.rounds": 100_000,
        "data.partition.num_clients": 2,
    }
    with pytest.raises(PrivacyBudgetError, match=r"at most \d+ steps fit, which is \d+ rounds"):
        plan_experiment(load_experiment(EXPERIMENT, overrides))


@pytest.mark.parametrize(("sampling", "share"), [("poisson", 0.05), ("balls_and_bins", 1 / 18)])
def test_own_sampling_rates_set_the_batches(sampling: str, share: float) -> None:
    first, second = plans_of(
        {
            "privacy.clients": {"1": {"sampling_rate": 0.05}},
            "privacy.sampling": sampling,
            "privacy.target_epsilon": None,
            "privacy.noise_multiplier": 1.0,
        }
    )[:2]
    rates = [one.release_as(DpSgdMechanism).sampling.sampling_rate for one in (first, second)]
    assert rates[1] == pytest.approx(share)  # 72 examples, batches of 4
    assert rates[0] >= 0.2


def test_a_smaller_sampling_rate_needs_less_noise() -> None:
    first, second = plans_of({"privacy.clients": {"1": {"sampling_rate": 0.05}}})[:2]
    assert second.noise_multiplier < first.noise_multiplier


@pytest.mark.parametrize(
    ("size", "delta"), [(1, 0.1), (9, 1e-2), (10, 1e-2), (11, 1e-3), (100, 1e-3), (1000, 1e-4)]
)
def test_automatic_delta_is_well_below_one_over_the_size(size: int, delta: float) -> None:
    settings = PrivacySettings(noise_multiplier=1.0, delta="auto", max_grad_norm=1.0)
    assert delta_of(settings, size) == pytest.approx(delta)
    assert delta_of(settings, size) * size <= 0.1 * (1 + 1e-12)


def test_automatic_delta_is_each_clients_own() -> None:
    first, *others = plans_of(
        {
            "privacy.noise_multiplier": 1.0,
            "privacy.target_epsilon": None,
            "privacy.delta": "auto",
            "privacy.clients": {"0": {"delta": 1e-5}},
            "data.partition": {"scheme": "quantity", "num_clients": 20, "min_examples": 5},
        }
    )
    assert first.delta == 1e-5
    assert all(one.delta * one.examples <= 0.1 for one in others)
    assert len({one.delta for one in others}) > 1
