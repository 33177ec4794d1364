"""Groups of parameters over whole runs: charged jointly, checked, and refused where unproven."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant.groups import group_noise_multiplier
from fedsim.clients.mechanisms.dp_sgd import mechanism
from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.mechanism_probe import MechanismMismatchError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.replay import replay_run

GROUPS = {"1.*": {"max_grad_norm": 0.4}, "*": {"max_grad_norm": 0.3, "relative_noise": 3.0}}
EXPERIMENT: dict[str, Any] = {
    "name": "groups",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "mlp", "args": {"hidden": [40]}},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 100, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "target_epsilon": 4.0,
        "delta": 1e-3,
        "clipping": {"name": "flat", "groups": GROUPS},
    },
}
FIXED = {name: {"max_grad_norm": 0.3, "noise_multiplier": 2.0} for name in ("1.*", "*")}


def run(path: Path, **overrides: Any) -> RunDirectory:
    return RunDirectory(run_experiment(EXPERIMENT, overrides=overrides, out=path / "run").path)


def multipliers(found: RunDirectory) -> list[float]:
    record = json.loads((found.path / "ledger.jsonl").read_text().splitlines()[0])
    return record["ledger"][0]["event"]["event"]["noise_multipliers"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({}, 2),
        ({"privacy.clipping.name": "adaptive", "privacy.clipping.count_noise": 20.0}, 4),
        ({"privacy.clipping.groups": FIXED, "privacy.target_epsilon": None}, 2),
    ],
)
def test_a_run_is_charged_jointly_and_sound(
    tmp_path: Path, overrides: dict[str, Any], parts: int
) -> None:
    found = run(tmp_path, **overrides)
    charged = multipliers(found)
    assert len(charged) == parts
    row = found.read_json("privacy.json")["clients"][0]
    assert group_noise_multiplier(charged) == pytest.approx(row["noise_multiplier"], rel=2e-3)
    if "privacy.clipping.groups" in overrides:
        assert charged == pytest.approx([2.0, 2.0], rel=2e-3)
    else:
        assert charged[1] == pytest.approx(3 * charged[0], rel=1e-3)
        assert row["epsilon"] <= 4.0
    assert not verify_run(found).problems
    assert not replay_run(found).problems


def half_noise_in_one_group(step: mechanism.DpSgdMechanism, groups: Any) -> tuple[float, ...]:
    """A mutant: the second group gets half of the noise that is charged."""
    first, *others = ORIGINAL(step, groups)
    return (first, *(0.5 * length for length in others))


ORIGINAL = mechanism.DpSgdMechanism.grid_steps


@pytest.mark.usefixtures("whole_probe")
def test_too_little_noise_in_one_group_is_found_before_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mechanism.DpSgdMechanism, "grid_steps", half_noise_in_one_group)
    with pytest.raises(MechanismMismatchError, match="noise"):
        run(tmp_path)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_an_audit_finds_most_of_the_claim_and_a_group_with_too_little_noise(
    monkeypatch: pytest.MonkeyPatch, clipping: str
) -> None:
    equal = {name: {"max_grad_norm": 0.3} for name in GROUPS}
    changes: dict[str, Any] = {"privacy.clipping.name": clipping, "privacy.clipping.groups": equal}
    if clipping == "adaptive":
        changes["privacy.clipping.count_noise"] = 20.0
    loaded = load_experiment(EXPERIMENT, overrides=changes)
    audit = audit_experiment(loaded, clients=1, steps=200)
    assert not audit.violations
    assert audit.clients[0].findings.epsilon > 0.6 * audit.clients[0].claim.epsilon
    monkeypatch.setattr(mechanism.DpSgdMechanism, "grid_steps", half_noise_in_one_group)
    assert audit_experiment(loaded, clients=1, steps=60).violations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy.trust": "central", "local.steps": 1}, "has no proof for groups"),
        ({"privacy.unit": "client"}, "clipping.groups bounds nothing with unit: client"),
        (
            {"privacy.clipping": {"name": "per_layer", "groups": GROUPS}},
            "unknown key for name 'per_layer'; it belongs to 'flat' or 'adaptive'",
        ),
        ({"privacy.max_grad_norm": 1.0}, "remove max_grad_norm"),
        ({"privacy.clients": {"1": {"max_grad_norm": 1.0}}}, "remove max_grad_norm"),
        (
            {"privacy.clipping.groups": FIXED, "privacy.noise_multiplier": 1.0},
            "remove privacy.noise_mult",
        ),
        (
            {"privacy.clipping.groups": FIXED, "privacy.clients": {"1": {"noise_multiplier": 1.0}}},
            "remove noise_multiplier",
        ),
        (
            {"privacy.clipping.groups": {"*": {**FIXED["*"], "relative_noise": 2.0}}},
            "remove relative_noise",
        ),
    ],
)
def test_keys_that_contradict_groups_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(EXPERIMENT, overrides=changes)
    assert message in str(caught.value)


def test_a_parameter_in_no_group_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrivacyPlanError, match=r"parameter '3.weight' is in no group"):
        run(tmp_path, **{"privacy.clipping.groups": {"1.*": {"max_grad_norm": 1.0}}})


def test_clients_have_budgets_of_their_own(tmp_path: Path) -> None:
    own = {"0": {"target_epsilon": 1.0}, "1": {"noise_multiplier": 5.0}}
    found = run(tmp_path, **{"privacy.clients": own})
    rows = found.read_json("privacy.json")["clients"]
    assert rows[0]["epsilon"] <= 1.0 < rows[2]["epsilon"] <= 4.0
    assert rows[1]["noise_multiplier"] == 5.0
    assert not verify_run(found).problems
