"""The second figure, against an adversary who sees sums only: claimed where it is proved, once."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant.aggregate_view import RoundView, UploadTerms, aggregate_view
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.statement import UnsupportedClaimError, read_facts
from fedsim.statement.secure import AggregateViewSentence, NoAggregateViewSentence

CLIENTS, ROUNDS = 4, 3
HOLDS: dict[str, Any] = {
    "name": "view",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
    "model": {"name": "logistic"},
    "federation": {"rounds": ROUNDS},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, "noise": "secure"},
    "secure_aggregation": {"range_policy": "clip"},
}


def privacy_of(out: Path, **overrides: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in overrides.items()}
    run = run_experiment(HOLDS, overrides=changed, out=out)
    assert verify_run(RunDirectory(run.path)).problems == ()
    return json.loads((run.path / "privacy.json").read_text())


def said(privacy: dict[str, Any]) -> dict[str, str]:
    return {point["id"]: point["text"] for point in privacy["statement_points"]}


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return privacy_of(tmp_path_factory.mktemp("view") / "r")


def test_four_equal_clients_hide_behind_twice_the_noise(proved: dict[str, Any]) -> None:
    view = proved["secure_aggregation"]["aggregate_view"]
    (worst,) = [row for row in proved["clients"] if row["client"] == view["client"]]
    expected = aggregate_view(
        UploadTerms(**view["terms"]),
        [RoundView(sensitivity=1.0, noise=(1.0,) * CLIENTS)] * ROUNDS,
        sampling_rate=worst["sampling_rate"],
        delta=1e-3,
    )
    assert view["epsilon"] == pytest.approx(expected.epsilon, rel=0.05)  # sizes differ by one
    assert 0 < view["epsilon"] < 0.7 * proved["system_epsilon"]


def test_both_figures_are_stated_and_the_guarantee_stays_the_local_one(
    proved: dict[str, Any],
) -> None:
    words = said(proved)
    assert "server and helpers follow the protocol and share no secrets" in words["aggregate_view"]
    assert "does not replace the guarantee" in words["aggregate_view"]
    assert "none of them lowers the ε of the guarantee" in words["no_amplification"]
    assert "no_aggregate_view" not in words
    assert proved["system_epsilon"] == max(row["epsilon"] for row in proved["clients"])
    assert f"{proved['system_epsilon']:.3f}"[:4] in proved["statement"]
    assert "Against an adversary who" not in proved["statement"]


def test_a_lost_update_hides_behind_its_own_noise_only(tmp_path: Path) -> None:
    """Its client's charge stays, and nobody says who saw what."""
    faults = [{"kind": "dropout_after", "clients": [1], "rounds": [2]}]
    view = privacy_of(tmp_path / "r", faults=faults)["secure_aggregation"]["aggregate_view"]
    assert view["client"] == 1
    counts = {round(z, 3): count for z, count in view["noise_multipliers"]}
    assert counts[1.0] == 1
    assert sum(counts.values()) == ROUNDS


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("local__steps", 2, "local_steps > 1 (2 noisy steps in a round)"),
        ("privacy__noise", "seeded", "seeded noise is known to anyone who knows the seed"),
        ("privacy__clipping", "per_layer", "clipping per_layer is not flat"),
        ("local__optimizer", {"name": "adam", "lr": 0.01}, "optimizer adam is not linear"),
        ("secure_aggregation__range_policy", "error", "values decide who is summed"),
        ("secure_aggregation__protocol", "quantized", "updates are seen one by one"),
        ("privacy__noise_multiplier", 0.0, "some client adds no noise"),
        ("secure_aggregation__value_bound", 1e-3, "values were clipped to value_bound"),
    ],
)
def test_no_smaller_figure_without_every_condition(
    tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    """Two steps: the counterexample in tests/accountant/test_aggregate_view.py is such a run."""
    privacy = privacy_of(tmp_path / "r", **{key: value})
    view = privacy["secure_aggregation"]["aggregate_view"]
    assert view["epsilon"] == "not_claimed"
    assert reason in view["reason"]
    words = said(privacy)
    assert "aggregate_view" not in words
    assert reason in words["no_aggregate_view"]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("epsilon", 0.001),
        ("epsilon", 99.0),
        ("noise_multipliers", [[9.0, ROUNDS - 1], [0.1, 1]]),
        ("noise_multipliers", "many"),
        ("terms", {}),
        ("noise_multipliers", [[2.0, ROUNDS - 1]]),
        ("sampling_rate", 0.001),
        ("delta", 0.01),
        ("client", 7),
    ],
)
def test_a_forged_figure_cannot_be_stated(
    proved: dict[str, Any], where: str, value: object
) -> None:
    assert AggregateViewSentence(read_facts(proved)).text
    secure = proved["secure_aggregation"]
    forged = {**secure, "aggregate_view": {**secure["aggregate_view"], where: value}}
    facts = read_facts({**proved, "secure_aggregation": forged})
    assert not AggregateViewSentence.holds(facts)
    with pytest.raises(UnsupportedClaimError):
        AggregateViewSentence(facts)


def test_terms_that_did_not_run_cannot_be_claimed(proved: dict[str, Any]) -> None:
    facts = read_facts(proved)
    assert facts.mechanism is not None
    for change in ({"noise": "seeded"}, {"sampling": "shuffle"}, {"clipping": "automatic"}):
        mechanism = dataclasses.replace(facts.mechanism, **change)
        assert not AggregateViewSentence.holds(dataclasses.replace(facts, mechanism=mechanism))
    assert not NoAggregateViewSentence.holds(facts)
