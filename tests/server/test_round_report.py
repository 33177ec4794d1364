"""The report of a round: its line of `rounds.jsonl` holds what happened, as valid JSON."""

import json
import math
from dataclasses import replace

from fedsim.protocol.messages import Withdrawal
from fedsim.protocol.traffic import Traffic
from fedsim.server.evaluation import EvaluationResult
from fedsim.server.round_report import (
    Failure,
    RoundClients,
    RoundCost,
    RoundModel,
    RoundReport,
    SecureRoundReport,
    withdrawal_rounds,
)

REPORT = RoundReport(
    round_number=3,
    metrics={"test_loss": 0.5},
    clients=RoundClients((0, 2), (Failure(1, "no reply"),), (Withdrawal(4, "spent"),), {2: 1}),
    cost=RoundCost(1.23456),
    epsilon_max=2.5,
    clip_norms={0: 0.1, 2: 0.4, 3: 0.2},
)
ALWAYS = {
    "round",
    "test_loss",
    "participants",
    "failed",
    "withdrawn",
    "shortened",
    "seconds",
    "timeline",
    "epsilon_max",
    "clip_norm",
    "traffic",
    "update_norm",
    "noise_norm",
}


def test_a_line_has_the_keys_of_its_federation_and_no_others() -> None:
    assert set(REPORT.to_json()) == ALWAYS
    secure = replace(REPORT, secure=SecureRoundReport(metrics={"loss": None}))
    assert set(secure.to_json()) == ALWAYS | {"secure_aggregation", "loss"}
    silent = replace(REPORT, evaluation=None)
    assert silent.to_json().get("evaluated", "no key") is None
    scored = replace(silent, evaluation=EvaluationResult((0,), 5, {"accuracy": 0.5}))
    assert set(scored.to_json()) == ALWAYS | {"evaluated", "clients_accuracy"}


def test_a_line_says_who_took_part_failed_and_left() -> None:
    row = REPORT.to_json()
    assert row["participants"] == [0, 2]
    assert row["failed"] == [{"client": 1, "reason": "no reply"}]
    assert row["withdrawn"] == [{"client": 4, "reason": "spent"}]
    assert row["shortened"] == [{"client": 2, "steps": 1}]
    assert row["clip_norm"] == {"min": 0.1, "median": 0.2, "max": 0.4}
    assert row["seconds"] == 1.2346
    assert withdrawal_rounds([row]) == {4: 3}


def test_a_line_of_a_secret_round_has_no_bytes() -> None:
    traffic, model = Traffic(down=100, up=50), RoundModel(update_norm=1.0, noise_norm=0.5)
    report = replace(REPORT, cost=RoundCost(traffic=traffic), model=model)
    assert report.to_json().get("traffic") == {"down": 100, "up": 50}
    secret = report.without_participants().to_json()
    assert secret.get("traffic", "no key") is None
    assert (secret.get("update_norm"), secret.get("noise_norm")) == (1.0, 0.5)


def test_infinite_and_nan_values_become_null() -> None:
    spoiled = replace(REPORT, metrics={"test_loss": math.nan}, epsilon_max=math.inf)
    row = json.loads(json.dumps(spoiled.to_json(), allow_nan=False))
    assert row["test_loss"] is None
    assert row["epsilon_max"] is None
