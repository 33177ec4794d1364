"""Bytes of clients: the same as messages and as function calls; helpers are not counted."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.runs.runner import run_experiment
from fedsim.simulation.engines import LocalGrid

CLIENTS, VALUES = 5, 650  # of digits, logistic
EXPERIMENT: dict[str, Any] = {
    "name": "bytes",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
}
ADDITIVE = {"protocol": "additive", "aggregators": 2, "encoding": {"ring_bits": 64}}


def traffic(path: Path, **overrides: Any) -> Any:
    return run_experiment(EXPERIMENT, overrides=overrides, out=path).rounds[0]["traffic"]


def test_models_go_down_and_up_and_evaluation_goes_down(tmp_path: Path) -> None:
    model = CLIENTS * VALUES * 4
    assert traffic(tmp_path / "a") == {"down": model, "up": model}
    evaluated = traffic(tmp_path / "b", evaluation={"holdout": 0.2})
    assert evaluated == {"down": 2 * model, "up": model}
    corrected = traffic(tmp_path / "c", **{"federation.strategy": "scaffold"})
    assert corrected == {"down": 2 * model, "up": model}, "the model and a correction"


def test_a_sealed_update_is_a_share_and_a_seed_as_a_message_or_by_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = traffic(tmp_path / "calls", secure_aggregation=ADDITIVE)
    share = CLIENTS * VALUES * 8
    assert share + CLIENTS * 80 <= sealed["up"] <= share + CLIENTS * 300  # a sealed seed: 80 bytes
    assert sealed["down"] <= CLIENTS * (VALUES * 4 + 300)
    monkeypatch.setattr(LocalGrid, "direct_channel", lambda self: None)
    assert traffic(tmp_path / "messages", secure_aggregation=ADDITIVE) == sealed


def test_masked_updates_are_counted_after_the_keys(tmp_path: Path) -> None:
    masked = {"protocol": "secagg", "encoding": {"ring_bits": 64}}
    assert traffic(tmp_path / "r", secure_aggregation=masked)["up"] >= CLIENTS * VALUES * 8
