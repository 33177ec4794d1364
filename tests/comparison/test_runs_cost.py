"""What several runs cost together: recomputed by the accountants, and never claimed away."""

import json
from functools import partial
from pathlib import Path

import pytest

from fedsim.accountant import (
    EpsilonDelta,
    Gaussian,
    PoissonSampled,
    PrivacyLedger,
    RdpAccountant,
    RepeatAndSelect,
    SelfComposed,
)
from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.comparison.differences import PairCheck
from fedsim.comparison.outcomes import RunOutcome
from fedsim.comparison.results import Results, VariantResult
from fedsim.comparison.runs_cost import Tuning, tuning_cost
from fedsim.comparison.settings import SelectSettings
from fedsim.core.durable import GENESIS
from fedsim.runs.files import SCHEMAS, DamagedRunError

DELTA = 1e-5
STRONG, WEAK = PoissonSampled(0.1, Gaussian(2.0)), PoissonSampled(0.1, Gaussian(1.0))


PRIVACY = {"adjacency": "zero_out", "unit": "example", "trust": "local", "noise": "seeded"}


def with_slack(account: RdpAccountant, *, runs: int) -> float:
    """ε of the accountant, with the noise sampler's slack once for each run, as `fedsim totals`."""
    get_epsilon = account.get_epsilon
    for _ in range(runs):
        get_epsilon = partial(epsilon_with_slack, get_epsilon)
    return get_epsilon(DELTA)


def write_privacy(path: Path, privacy: dict[str, str] | None) -> None:
    seed = int(path.name.split("-")[1])
    content = json.dumps({"seed": seed, "privacy": privacy})
    (path / "experiment.yaml").write_text(content)


def write_run(
    path: Path, *clients: tuple[PoissonSampled | EpsilonDelta, int], private: bool = True
) -> None:
    path.mkdir(parents=True)
    write_privacy(path, PRIVACY if private else None)
    (path / "ledger.jsonl").touch()
    for client, (event, count) in enumerate(clients):
        ledger = PrivacyLedger()
        ledger.record(event, count)
        FileJournal(path / "ledger.jsonl").append(
            Charge(client, 1, "0" * 64, count, ledger, GENESIS)
        )


def variant(name: str, accuracies: list[float], *, private: bool = True) -> VariantResult:
    runs = tuple(
        RunOutcome(
            variant=name,
            seed=seed,
            path=f"runs/{name}/seed-{seed}",
            status="completed",
            metrics={"test_accuracy": value, "test_loss": 1 - value},
            is_private=private,
            delta=DELTA if private else None,
            client_metrics=({"client": 0, "examples": 3, "client_accuracy": value},),
        )
        for seed, value in enumerate(accuracies)
    )
    return VariantResult(name, {}, runs, None)


def results(*variants: VariantResult) -> Results:
    pairing = PairCheck({}, 1)
    return Results("test", "test_accuracy", variants[0].name, (0, 1), variants, pairing)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / "plain" / f"seed-{seed}", private=False)
        for name in ("a", "b"):
            write_run(tmp_path / "runs" / name / f"seed-{seed}", (STRONG, 30), (WEAK, 30))
    return tmp_path


def cost(out: Path, select: SelectSettings | None) -> Tuning:
    found = results(
        variant("plain", [0.9, 0.9], private=False),
        variant("a", [0.5, 0.6]),
        variant("b", [0.7, 0.6]),
    )
    return tuning_cost(found, out, select)


def test_runs_compose_as_the_accountant_says_with_each_runs_worst_client(out: Path) -> None:
    found = cost(out, None)
    expected = with_slack(RdpAccountant().compose(WEAK, 4 * 30), runs=4)
    assert found.everything.epsilon == pytest.approx(expected, rel=1e-12)
    assert (found.everything.runs, found.everything.not_private) == (6, 2)


def test_a_single_private_run_is_named_as_one(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "plain" / "seed-0", private=False)
    write_run(tmp_path / "runs" / "a" / "seed-0", (STRONG, 30))
    runs = results(variant("plain", [0.9], private=False), variant("a", [0.5]))
    statement = tuning_cost(runs, tmp_path, None).statement
    assert "The run with privacy in this directory costs ε ≤ " in statement


@pytest.mark.parametrize("event", [PoissonSampled(0.1, Gaussian(0.05)), EpsilonDelta(0.1, 1e-9)])
def test_where_nothing_is_proven_there_is_no_finite_epsilon(
    tmp_path: Path, event: PoissonSampled | EpsilonDelta
) -> None:
    """At a large ε the sampler's error has no bound, and Rényi DP leaves the δ of a step out."""
    write_run(tmp_path / "runs" / "a" / "seed-0", (event, 30))
    write_run(tmp_path / "runs" / "b" / "seed-0", (STRONG, 30))
    found = tuning_cost(results(variant("a", [0.5]), variant("b", [0.4])), tmp_path, None)
    assert found.everything.epsilon is None
    assert "The 2 runs with privacy together have no finite ε." in found.statement


def test_runs_of_two_units_have_no_common_epsilon(out: Path) -> None:
    for seed in (0, 1):
        run = out / "runs" / "b" / f"seed-{seed}"
        write_privacy(run, {**PRIVACY, "unit": "client", "trust": "central"})
    found = cost(out, None)
    assert (found.everything.epsilon, found.everything.against) == (None, None)
    assert "have two units or adjacencies, which do not compose" in found.statement


def test_a_composition_names_the_observer_whom_all_claims_cover(out: Path) -> None:
    for seed in (0, 1):
        run = out / "runs" / "b" / f"seed-{seed}"
        write_privacy(run, {**PRIVACY, "unit": "example", "trust": "distributed"})
    found = cost(out, None)
    assert found.everything.against == "sums"
    assert "for an observer of sums (Rényi composition" in found.statement


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_shared_noise_of_one_seed_is_named_beside_the_cost(out: Path, noise: str) -> None:
    """An adversary could subtract it: `fedsim totals` has no ε for such runs."""
    for name in ("a", "b"):
        for seed in (0, 1):
            write_privacy(out / "runs" / name / f"seed-{seed}", {**PRIVACY, "noise": noise})
    select = SelectSettings(metric="test_accuracy", on="public_test")
    for found in (cost(out, None), cost(out, select)):
        sentence = "the simulated runs of one seed share their noise"
        assert (sentence in found.statement) == found.everything.shares_noise
        assert found.everything.shares_noise == (noise == "seeded")


def test_superseded_runs_count(out: Path) -> None:
    write_run(out / "superseded" / "a" / "seed-0-1", (WEAK, 30))
    expected = with_slack(RdpAccountant().compose(WEAK, 5 * 30), runs=5)
    assert cost(out, None).everything.epsilon == pytest.approx(expected, rel=1e-12)


def test_a_run_whose_ledger_lacks_records_has_no_cost(out: Path) -> None:
    """What is left of a ledger is not what was spent."""
    clients = [{"client": 0, "ledger_head": "1" * 64}]
    content = {"schema": SCHEMAS["privacy.json"], "clients": clients}
    (out / "runs" / "a" / "seed-0" / "privacy.json").write_text(json.dumps(content))
    with pytest.raises(DamagedRunError, match="it lacks the record of client 0 that privacy"):
        cost(out, None)


def test_clients_that_are_worst_at_different_orders_are_both_covered(tmp_path: Path) -> None:
    few, many = PoissonSampled(0.01, Gaussian(0.5)), PoissonSampled(0.5, Gaussian(4.0))
    write_run(tmp_path / "runs" / "a" / "seed-0", (few, 5), (many, 60))
    write_run(tmp_path / "runs" / "b" / "seed-0", (few, 5), (many, 60))
    found = tuning_cost(results(variant("a", [0.5]), variant("b", [0.4])), tmp_path, None)
    assert found.everything.epsilon is not None
    for event, count in ((few, 5), (many, 60)):
        one = RdpAccountant().compose(event, 2 * count).get_epsilon(DELTA)
        assert found.everything.epsilon >= one
    mixed = RdpAccountant().compose(few, 5).compose(many, 60).get_epsilon(DELTA)
    assert found.everything.epsilon >= mixed * (1 - 1e-12)


def test_random_selection_is_repeat_and_select_of_the_accountant(out: Path) -> None:
    found = cost(out, SelectSettings(metric="test_accuracy", on="public_test"))
    assert found.candidates is not None
    event = RepeatAndSelect(SelfComposed(WEAK, 30), 4.0, None)
    expected = with_slack(RdpAccountant().compose(event), runs=4)
    assert found.candidates.selected_epsilon == pytest.approx(expected, rel=1e-9)


def test_the_best_mean_is_selected_among_private_variants(out: Path) -> None:
    assert cost(out, SelectSettings(metric="test_accuracy", on="public_test")).selected == "b"
    assert cost(out, SelectSettings(metric="test_loss", on="public_test")).selected == "b"
    assert cost(out, SelectSettings(metric="client_accuracy", on="private")).selected == "b"
    among = SelectSettings(metric="test_accuracy", on="public_data", among=["plain", "a"])
    assert cost(out, among).selected == "plain"


def test_scores_on_a_public_test_set_do_not_make_a_choice_free(out: Path) -> None:
    found = cost(out, SelectSettings(metric="test_accuracy", on="public_test"))
    assert "so the choice costs privacy" in found.statement
    assert "The results of all 4 candidate runs were seen" in found.statement
    assert "This comparison did neither" in found.statement


def test_scores_on_training_data_have_no_epsilon(out: Path) -> None:
    found = cost(out, SelectSettings(metric="client_accuracy", on="private"))
    assert "no ε covers them, and the choice has no privacy guarantee" in found.statement


def test_scores_on_private_test_examples_say_whom_they_protect(out: Path) -> None:
    found = cost(out, SelectSettings(metric="test_accuracy", on="private"))
    assert "gives these test examples no protection" in found.statement


def test_public_data_cost_nothing_if_they_are_public(out: Path) -> None:
    found = cost(out, SelectSettings(metric="test_accuracy", on="public_data"))
    assert "The file declares every example of this comparison public. If that is so" in (
        found.statement
    )


def test_a_candidate_without_privacy_leaves_no_guarantee(out: Path) -> None:
    among = SelectSettings(metric="test_accuracy", on="public_test", among=["plain", "a"])
    assert "2 of the 4 candidate runs had no privacy" in cost(out, among).statement


def test_a_variant_that_lacks_a_seed_cannot_be_selected(out: Path) -> None:
    half = variant("a", [0.99])
    whole = variant("b", [0.5, 0.5])
    broken = VariantResult("a", {}, (*half.outcomes, *failed(half)), None)
    select = SelectSettings(metric="test_accuracy", on="public_test")
    assert tuning_cost(results(broken, whole), out, select).selected == "b"


def failed(one: VariantResult) -> tuple[RunOutcome, ...]:
    from dataclasses import replace

    return (replace(one.outcomes[0], seed=1, status="failed", metrics={}),)
