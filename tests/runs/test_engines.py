"""One experiment, one result: the same model bits and ledgers for any number of workers.

Flower's runtime asks client by client: there, models agree within rounding, and charges are equal.
On real SuperNodes: tests/tools/deployment/test_deployment.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.runs.runner import run_experiment
from fedsim.tracking.callbacks import RunCallback

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray")]

PRIVATE = {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5}


# The bound that a client has learnt comes back to it from the server, on every engine.
LEARNING = {
    "noise_multiplier": 1.0,
    "delta": 1e-3,
    "max_grad_norm": 0.5,
    "clipping": {"name": "adaptive", "count_noise": 1.6},
}
Outcome = Callable[[Path], dict[str, Any]]


def experiment(privacy: dict[str, Any] | None) -> dict[str, Any]:
    sections = {
        "name": "engines",
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": 9, "min_examples": 20},
        },
        "model": {"name": "mlp", "args": {"hidden": [8]}},
        "federation": {"rounds": 2, "clients_per_round": 8, "weighting": "examples"},
        "local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    }
    if privacy is None:
        return {**sections, "privacy": None, "evaluation": {"holdout": 0.2, "clients": 3}}
    return {**sections, "privacy": privacy}


class Blocks:
    """An observer that keeps the blocks of a run."""

    def started(self, federation: Any, path: Path) -> None:
        self.plan = federation.blocks.plan

    def round_finished(self, row: Any) -> None: ...

    def ended(self) -> None: ...


@pytest.mark.parametrize("privacy", [PRIVATE, LEARNING, None], ids=["private", "adaptive", "plain"])
def test_local_and_ray_agree_to_the_bit(
    tmp_path: Path, outcome_of: Outcome, privacy: dict[str, Any] | None
) -> None:
    seen = Blocks()
    local = run_experiment(experiment(privacy), out=tmp_path / "local", callback=seen)
    if privacy is PRIVATE:
        assert len(seen.plan.ranges) == 2, "one for each worker"
        assert [len(block) for block in seen.plan.blocks(1)] == [4, 4]
    workers = 1 if privacy is PRIVATE else 2
    overrides = {"runtime.engine": "ray", "runtime.workers": workers}
    ray = run_experiment(experiment(privacy), overrides=overrides, out=tmp_path / "ray")
    assert outcome_of(local.path) == outcome_of(ray.path)
    records = (local.path / "ledger.jsonl").read_text().splitlines()
    assert len(records) == (16 if privacy else 0)


@pytest.mark.parametrize("privacy", [LEARNING, None], ids=["adaptive", "plain"])
def test_flower_agrees_to_the_bit_where_clients_train_alone(
    tmp_path: Path, outcome_of: Outcome, privacy: dict[str, Any] | None
) -> None:
    """Within rounding, where the others train together: test_faults.py."""
    flower = {"runtime.engine": "flower", "runtime.workers": 2}
    local, other = (
        run_experiment(
            experiment(privacy),
            overrides={**overrides, "local.vectorized_clients": "off"},
            out=tmp_path / name,
        ).path
        for name, overrides in (("local", {}), ("flower", flower))
    )
    assert outcome_of(local) == outcome_of(other)


def test_a_run_may_change_its_engine_when_it_is_resumed(
    tmp_path: Path, outcome_of: Outcome, stop_after: Callable[[int], RunCallback]
) -> None:
    """Accounts are in the ledger, clip norms in the checkpoint, streams are keyed by round."""
    whole = run_experiment(experiment(LEARNING), out=tmp_path / "whole")
    ray = {"runtime.engine": "ray", "runtime.workers": 2}
    part = run_experiment(
        experiment(LEARNING), overrides=ray, out=tmp_path / "r", callback=stop_after(1)
    )
    assert part.status == "interrupted"
    run_experiment(experiment(LEARNING), out=tmp_path / "r", resume=True)
    assert outcome_of(whole.path) == outcome_of(tmp_path / "r")
