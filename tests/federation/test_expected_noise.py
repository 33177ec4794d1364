"""Length of the noise in an aggregate: that of updates which are noise and little else."""

from pathlib import Path
from typing import Any

import pytest

from fedsim.federation.aggregate_noise import sum_noise
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.runs.runner import run_experiment

EXPERIMENT: dict[str, Any] = {
    "name": "noise",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "quantity", "num_clients": 6, "alpha": 1.0, "min_examples": 30},
    },
    "model": {"name": "mlp", "args": {"hidden": [50]}},  # a larger one is probed in fewer rounds
    "federation": {"rounds": 2, "clients_per_round": 4},
    "local": {"steps": 3, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 40.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
CLIENT = {
    "privacy": {"unit": "client", "noise_multiplier": 40.0, "delta": 1e-2, "max_update_norm": 0.4}
}
SECURE = {"protocol": "additive", "aggregators": 2, "min_clients": 3}


def rows(path: Path, **overrides: Any) -> list[Any]:
    return [*run_experiment(EXPERIMENT, overrides=overrides, out=path / "run").rounds]


def test_noise_of_clients_adds_up_to_the_length_of_the_update(tmp_path: Path) -> None:
    for row in rows(tmp_path, **{"federation.weighting": "examples"}):
        assert row["update_norm"] == pytest.approx(row["noise_norm"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"privacy.clipping": "per_layer"},
        {"privacy.clipping": {"name": "adaptive", "count_noise": 50.0}, "local.steps": 1},
        {
            "privacy.clients": {"2": {"noise_multiplier": 80.0}},
            "federation.weighting": "examples_over_noise",
        },
        {"privacy.trust": "central", "local.steps": 1},
        {"privacy.trust": "distributed", "local.steps": 1, "secure_aggregation": SECURE},
        CLIENT,
        {**CLIENT, "privacy.clipping": {"name": "adaptive", "count_noise": 50.0}},
        {**CLIENT, "privacy.trust": "distributed", "secure_aggregation": SECURE},
        {
            **CLIENT,
            "privacy.trust": "central",
            "federation.participation": {"scheme": "poisson"},
        },
        {
            **CLIENT,
            "privacy.trust": "central",
            "privacy.clipping": {"name": "adaptive", "count_noise": 50.0},
        },
    ],
    ids=lambda overrides: " ".join(map(str, overrides)),
)
def test_every_way_to_add_noise_is_known(tmp_path: Path, overrides: dict[str, Any]) -> None:
    for row in rows(tmp_path, **overrides):
        assert row["update_norm"] == pytest.approx(row["noise_norm"], rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"local.optimizer": {"name": "adam", "lr": 0.01}},
        {"local.optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5}},
        {"privacy.clipping": {"name": "adaptive", "count_noise": 50.0}},
    ],
)
def test_noise_without_a_closed_form_is_not_known(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    for row in rows(tmp_path, **overrides):
        assert row["noise_norm"] is None
        assert row["update_norm"] > 0


def test_noise_over_a_public_divisor_does_not_show_who_came() -> None:
    shapes = {"w": (5, 2)}
    plan = SumPlan(unit=0.1, bound=9, shapes=shapes, server_noise=True, divisor=2.0)
    norm = sum_noise(plan, weights=(1, 1, 1), clip_norm=1.0, size=10)
    assert norm({}, {}, 1) == norm({0: 1, 2: 1}, {}, 1)
    assert norm({}, {}, 1) is not None
