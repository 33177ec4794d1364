"""Whole updates in noisy sums, and the bound that the server learns from a charged bit."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.accountant import Gaussian, JointGaussian, PoissonSampled
from fedsim.accountant.groups import group_noise_multiplier
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.algorithms.state import ServerState
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.experiment import load_experiment
from fedsim.experiment.errors import ExperimentError
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.noise.sources import DEVIATION
from fedsim.protocol.arrays import to_arrays
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.noisy_sums import CLIP_COUNT, BoundRule
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.server.round_parts import Aggregate, SharedBound
from fedsim.tools.replay import replay_run

CLIENTS, ROUNDS = 12, 3
SECURE = {"protocol": "additive", "aggregators": 2, "min_clients": 10}
EXPERIMENT: dict[str, Any] = {
    "name": "sums",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
    "model": {"name": "mlp", "args": {"hidden": [50]}},  # a larger one is probed in fewer rounds
    "federation": {"rounds": ROUNDS},
    "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "unit": "client",
        "noise_multiplier": 0.7,
        "delta": 1e-2,
        "max_update_norm": 0.4,
    },
}
DISTRIBUTED = {"privacy.trust": "distributed", "secure_aggregation": SECURE}
CENTRAL = {"privacy.trust": "central"}
POISSON = {
    **CENTRAL,
    "federation.participation": {"scheme": "poisson"},
    "federation.clients_per_round": 4,
}
ADD_REMOVE = {"name": "add_remove", "declared_examples": 5}
ADAPTIVE = {"privacy.clipping": {"name": "adaptive", "count_noise": 2.0}}


def federation_of(**overrides: Any) -> Federation:
    return assemble(load_experiment(EXPERIMENT, overrides=overrides), ledger=None)


def run(path: Path, overrides: dict[str, Any], **options: Any) -> Path:
    return run_experiment(EXPERIMENT, overrides=overrides, out=path, **options).path


def events(path: Path) -> set[Any]:
    journal = FileJournal(path / "ledger.jsonl")
    charges = [charge for client in journal.clients() for charge in journal.history(client)]
    assert len(charges) == CLIENTS * ROUNDS
    return {entry for charge in charges for entry in charge.ledger.entries}


def test_shares_are_planned_for_the_smallest_sum() -> None:
    federation = federation_of(**DISTRIBUTED)
    assert federation.plan.clients is not None
    assert federation.plan.sums is not None
    for plan in federation.plan.clients:
        update = plan.release_as(UpdateMechanism)
        ((event, count),) = plan.charges(0, 1)
        assert isinstance(event, Gaussian)
        assert count == 1
        assert 0.7 * (1 - 1e-4) < event.noise_multiplier <= 0.7 * (1 + 1e-9)
        ((own, _),) = plan.server_charges(0, 1) or []
        assert isinstance(own, Gaussian)
        assert own.noise_multiplier == pytest.approx(0.7 / 3.0, rel=1e-4)  # h = 10 - 1
        assert federation.plan.sums.unit == pytest.approx(update.update_step)
    assert federation.plan.sums.unit * DEVIATION == pytest.approx(0.7 * 0.4 / 3.0)


def test_central_trust_leaves_the_noise_to_the_server() -> None:
    federation = federation_of(**CENTRAL)
    assert federation.plan.clients is not None
    assert federation.plan.sums is not None
    assert federation.plan.sums.server_noise
    plan = federation.plan.clients[0]
    assert plan.part is not None
    assert not plan.part.adds_noise
    assert plan.server_charges(0, 1) is None
    assert federation.plan.sums.unit * DEVIATION == pytest.approx(0.7 * 0.4)


def test_a_secret_draw_amplifies_and_divides_by_a_public_number() -> None:
    federation = federation_of(**POISSON)
    assert federation.plan.clients is not None
    assert federation.plan.sums is not None
    assert federation.plan.sums.divisor == pytest.approx(4.0)
    for plan in federation.plan.clients:
        assert not plan.charges_itself
        assert plan.planned_steps == ROUNDS
        ((event, _),) = plan.charges(0, ROUNDS)
        assert isinstance(event, PoissonSampled)
        assert event.sampling_rate == pytest.approx(1 / 3)


def test_the_bit_is_a_part_of_the_sum_and_of_the_event() -> None:
    for trust, honest in ((DISTRIBUTED, 9), (CENTRAL, 1)):
        federation = federation_of(**trust, **ADAPTIVE)
        assert federation.plan.clients is not None
        assert federation.plan.sums is not None
        assert federation.plan.sums.shapes[CLIP_COUNT] == (1,)
        assert federation.plan.sums.count_unit == pytest.approx(2.0 / math.sqrt(honest) / DEVIATION)
        plan = federation.plan.clients[0]
        update = plan.release_as(UpdateMechanism)
        assert federation.plan.sums.unit * 0.4 == pytest.approx(update.update_step)  # at S = 1
        ((event, _),) = plan.charges(0, 1)
        assert isinstance(event, JointGaussian)
        assert group_noise_multiplier(event.noise_multipliers) == pytest.approx(0.7, rel=1e-4)


def test_the_server_learns_the_quantile() -> None:
    rule = BoundRule(quantile=0.5, learning_rate=0.2)
    state = ServerState(to_arrays({}))

    def after(shared: SharedBound, aggregate: Aggregate) -> Mapping[int, object]:
        assert shared.of(state.clip_norms) == 0.4
        return shared.after(state, aggregate).clip_norms

    shared = SharedBound(0.4, rule, num_clients=3, unit=0.25)
    # Both clients were within the bound: the share is 1, and the bound falls.
    learnt = after(shared, Aggregate([0, 1], clip_count=4))
    assert learnt == dict.fromkeys(range(3), 0.4 * math.exp(-0.2 * 0.5))
    assert after(shared, Aggregate([]))[0] == 0.4
    fixed = SharedBound(0.4, rule, num_clients=3, unit=0.25, divisor=4.0)
    assert after(fixed, Aggregate([], clip_count=0))[0] == 0.4
    bits = SharedBound(0.4, rule, num_clients=3)
    for client, bit in enumerate([0.5, -0.5]):
        bits.take(client, TrainReply({}, 1, None, clip_count=bit))
    assert after(bits, Aggregate([0, 1]))[0] == 0.4
    assert after(bits, Aggregate([0]))[0] == pytest.approx(0.4 * math.exp(-0.2 * 0.5))
    assert after(bits, Aggregate([]))[0] == 0.4


CELLS = {
    "local": {},
    "distributed": DISTRIBUTED,
    "central": CENTRAL,
    "central, secure": {**CENTRAL, "secure_aggregation": SECURE},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "clipping"), [("distributed", "flat"), *((cell, "adaptive") for cell in CELLS)]
)
def test_a_cell_runs_resumes_and_is_computed_again(
    tmp_path: Path, cell: str, clipping: str, stop_after
) -> None:
    overrides = CELLS[cell] | (ADAPTIVE if clipping == "adaptive" else {})
    whole = run(tmp_path / "whole", overrides)
    assert verify_run(RunDirectory.open(whole)).problems == ()
    assert replay_run(RunDirectory.open(whole)).problems == ()
    run(tmp_path / "part", overrides, callback=stop_after(1))
    run(tmp_path / "part", overrides, resume=True)
    part = load_file(tmp_path / "part" / "model.safetensors")
    for name, value in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(part[name], value)
    assert events(whole) == events(tmp_path / "part")
    bounds = {row["clip_norm"] for row in _clients(whole)}
    assert len(bounds) == 1  # one bound for all
    assert (bounds == {None}) == (clipping == "flat")
    assert bounds != {0.4}
    assert _clients(whole) == _clients(tmp_path / "part")


def _clients(path: Path) -> list[dict[str, Any]]:
    rows = json.loads((path / "privacy.json").read_text())["clients"]
    return [{k: v for k, v in row.items() if k != "ledger_head"} for row in rows]


@pytest.mark.slow
def test_secure_and_plain_sums_of_central_trust_are_the_same_integers(tmp_path: Path) -> None:
    plain = load_file(run(tmp_path / "p", CENTRAL) / "model.safetensors")
    secure = load_file(run(tmp_path / "s", CELLS["central, secure"]) / "model.safetensors")
    for name, value in plain.items():
        np.testing.assert_array_equal(secure[name], value)


@pytest.mark.slow
def test_a_secret_draw_charges_every_client_for_every_round(tmp_path: Path) -> None:
    path = run(tmp_path / "r", POISSON)
    assert all(isinstance(event, PoissonSampled) for event, _ in events(path))
    assert verify_run(RunDirectory.open(path)).problems == ()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"privacy.trust": "distributed"}, "add secure_aggregation"),
    (
        {**DISTRIBUTED, **ADAPTIVE, "privacy.trust.fallback_epsilon": 9.0},
        "use clipping: flat, or remove fallback_epsilon",
    ),
    ({**DISTRIBUTED, "privacy.adjacency": ADD_REMOVE}, "list of clients; use zero_out"),
    (
        {
            **CENTRAL,
            **ADAPTIVE,
            "federation.weighting": {
                "name": "examples_over_noise",
                "size_power": 0,
                "noise_power": 1,
            },
        },
        "counts every client once",
    ),
    ({**ADAPTIVE, "secure_aggregation": {"protocol": "additive"}}, "remove secure_aggregation"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_has_no_theorem_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load_experiment(EXPERIMENT, overrides=change)
