"""The report states exactly what ran."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.runs.privacy_summary import secure_facts
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.settings import SecureAggregationSettings


def report(
    *,
    rows: Sequence[dict[str, Any]] = (),
    plan_digest: str = "",
    is_integer_sum: bool = False,
    one_operator: bool = True,
    **keys: Any,
) -> dict[str, Any]:
    settings = SecureAggregationSettings.model_validate(keys)
    encoder = FixedPointEncoder.from_settings(settings.encoding, num_clients=10, weighted=False)
    codec = SimpleNamespace(encoder=encoder, is_integers=is_integer_sum)
    sampled = SimpleNamespace(round_sizes=(10, 10))
    federation: Any = SimpleNamespace(
        secure=SimpleNamespace(settings=settings, codec=codec),
        plan=SimpleNamespace(participation=sampled, digest=plan_digest),
        experiment=SimpleNamespace(privacy=None),
    )
    facts = secure_facts(federation, rows, one_operator=one_operator)
    assert facts is not None
    return facts


def test_it_is_json_and_counts_every_round() -> None:
    rounds = [(2, 9, None), (1, 10, None), (3, 0, "helper 2 is silent"), (4, 0, None)]
    counts = {"retried": 0, "clipped": 1}
    rows = [
        {"round": number, "secure_aggregation": {"survivors": n, "aborted": aborted, **counts}}
        for number, n, aborted in rounds
    ]
    facts = json.loads(json.dumps(report(rows=rows, aggregators=3)))
    assert facts["parties"]["helpers"] == 2
    assert facts["parties"]["survivors_per_round"] == [10, 9]
    assert facts["rounds"] == {
        "completed": 2,
        "aborted": 1,
        "retried": 0,
        "reasons": {"3": "helper 2 is silent"},
    }
    assert facts["clipped"] == 4
    assert facts["encoding"]["max_abs_error"] > 0
    assert facts["simulated_non_collusion"] is True


@pytest.mark.parametrize("protocol", ["additive", "secagg", "secagg_plus", "quantized"])
def test_the_control_arm_claims_no_secrecy(protocol: str) -> None:
    facts = report(protocol=protocol)
    sees_all = "every update" in facts["server_view"]
    assert sees_all == (protocol == "quantized") == (facts["envelope"] is None)
    assert facts["trust"]["malicious_clients"] == "undetected"
    assert facts["parties"]["helpers"] == (1 if protocol == "additive" else 0)
    assert not any("loss" in seen for seen in facts["server_view"])
    declared = report(protocol=protocol, metrics={"train_loss": 3.0})["server_view"]
    assert ("every train_loss" if sees_all else "sum of weighted train_loss") in declared


HELPER = {"helper_fingerprints": ["ab" * 32]}
CLIENTS = {"client_fingerprints": ["cd" * 32, "ef" * 32]}
PINNED = {"keys": {**HELPER, **CLIENTS}}


def test_an_active_server_is_covered_only_by_pinned_keys() -> None:
    assert report()["trust"]["active_server"] == "not_covered"
    pinned = report(keys=HELPER)
    assert pinned["trust"]["active_server"] == "pinned_helper_keys"


@pytest.mark.parametrize(
    ("unmet", "settings", "facts"),
    [
        (set(), PINNED, {}),
        ({"pinned_keys"}, {"keys": HELPER}, {}),
        ({"pinned_keys"}, {"keys": CLIENTS}, {}),
        ({"opened_once"}, PINNED, {"one_operator": False}),
        ({"agreed_plan"}, PINNED, {"plan_digest": ""}),
        ({"fixed_set"}, PINNED, {"is_integer_sum": False}),
        (
            {"pinned_keys", "opened_once", "agreed_plan", "fixed_set"},
            {"protocol": "secagg"},
            {},
        ),
    ],
)
def test_each_condition_of_an_active_server_counts(
    unmet: set[str], settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    met: dict[str, Any] = {"plan_digest": "12" * 32, "is_integer_sum": True}
    found = report(**{**met, **facts}, **settings)["trust"]["conditions"]
    assert {name for name, holds in found.items() if not holds} == unmet
