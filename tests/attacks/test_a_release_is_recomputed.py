"""A run whose clients released something else than they were charged for is found by a replay.

A patched engine runs: it charges as planned, and the files of its run agree with each other, so
`fedsim verify` finds nothing. `fedsim verify --replay`, on an engine that is not patched, names the
first client and round.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from torch import Tensor

from fedsim.cli import cli
from fedsim.clients import client_round
from fedsim.clients.mechanisms.dp_sgd import mechanism
from fedsim.clients.training.member import StreamKey
from fedsim.core.errors import ExitCode
from fedsim.noise.sources import NoiseSource
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.server.aggregation.aggregator import OrderedMean
from fedsim.tools.replay import replay_run

CLIENT, ROUND = 2, 2
EXPERIMENT: dict[str, Any] = {
    "name": "patched",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "federation": {"rounds": ROUND},
    "local": {"steps": 2, "batch_size": 24},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
SECURE = {"secure_aggregation": {"protocol": "additive", "aggregators": 2}}
Patch = Callable[[pytest.MonkeyPatch], None]


def is_target(key: StreamKey) -> bool:
    return (key.client, key.round_number) == (CLIENT, ROUND)


def of_client_in_round(change: Callable[[np.ndarray], np.ndarray]) -> Patch:
    """Change the trained values of one client in one round, before they are uploaded."""
    upload = client_round._upload

    def patched(entry: Any, trained: Any) -> Any:
        asked = entry.asked
        if (asked.task.client, asked.request.round_number) == (CLIENT, ROUND):
            trained = replace(trained, values=change(trained.values.copy()))
        return upload(entry, trained)

    return lambda patch: patch.setattr(client_round, "_upload", patched)


def no_noise(patch: pytest.MonkeyPatch) -> None:
    """The noise of one client in one round is zero, but not in the probe before the first round."""
    noise, train = StreamKey.noise, client_round._train
    training: list[bool] = []

    def in_a_round(rounds: Any) -> Any:
        training.append(True)
        try:
            return train(rounds)
        finally:
            training.pop()

    class Quiet:
        def __init__(self, source: NoiseSource) -> None:
            self._source = source

        def keystreams(self) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._source, name)
            if not callable(found):
                return found

            def quiet(*arguments: Any, **options: Any) -> Any:
                result = found(*arguments, **options)
                return result.zero_() if isinstance(result, Tensor) else result

            return quiet

    def patched(self: StreamKey, **given: Any) -> Any:
        source = noise(self, **given)
        return Quiet(source) if training and is_target(self) else source

    patch.setattr(client_round, "_train", in_a_round)
    patch.setattr(StreamKey, "noise", patched)


def other_batches(patch: pytest.MonkeyPatch) -> None:
    """One client takes the batches of another round."""
    batches = StreamKey.draw_batches

    def patched(self: StreamKey, *arguments: Any, **options: Any) -> Any:
        key = replace(self, round_number=9) if is_target(self) else self
        return batches(key, *arguments, **options)

    patch.setattr(StreamKey, "draw_batches", patched)


def last_bit(values: np.ndarray) -> np.ndarray:
    values[-1] = np.nextafter(values[-1], np.float32(np.inf))
    return values


ATTACKS: dict[str, Patch] = {
    "no noise": no_noise,
    "other batches": other_batches,
    "one last bit": of_client_in_round(last_bit),
    "nothing trained": of_client_in_round(np.zeros_like),
    "an offset": of_client_in_round(lambda values: values + np.float32(1e-3)),
}


def patched_run(attack: Patch, path: Path, **change: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        attack(patch)
        run_experiment(EXPERIMENT, overrides=change, out=path)
    assert verify_run(RunDirectory.open(path)).problems == ()
    return path


def difference(path: Path) -> str:
    """Return the first difference that the command prints."""
    found = CliRunner().invoke(cli, ["verify", str(path), "--replay"])
    assert found.exit_code == ExitCode.FAILED, found.output
    return found.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("attack", "vectorized_clients"),
    [*((attack, "auto") for attack in ATTACKS), ("one last bit", "off")],
)
def test_an_upload_of_a_patched_client_is_named(
    attack: str, vectorized_clients: str, tmp_path: Path
) -> None:
    path = patched_run(
        ATTACKS[attack], tmp_path / "r", **{"local.vectorized_clients": vectorized_clients}
    )
    assert difference(path) == (
        f"{path}: client {CLIENT}, round {ROUND}: its upload is not the one that its charge, its "
        "seed and its data give"
    )


@pytest.mark.parametrize("attack", ["no noise", "an offset"])
def test_a_secret_shared_sum_with_a_patched_upload_is_named_by_its_round(
    attack: str, tmp_path: Path
) -> None:
    path = patched_run(ATTACKS[attack], tmp_path / "r", **SECURE)
    assert f"round {ROUND}: the global model is not the mean" in difference(path)


def test_a_patched_aggregate_is_named_by_its_round(tmp_path: Path) -> None:
    result = OrderedMean.result

    def attack(patch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def patched(self: OrderedMean) -> Any:
            calls.append(1)
            found = result(self)
            if len(calls) == ROUND and found is not None:
                name = next(iter(found))
                found[name] = found[name] + np.float32(1e-3)
            return found

        patch.setattr(OrderedMean, "result", patched)

    path = patched_run(attack, tmp_path / "r")
    assert f"{path}: round {ROUND}: the global model is not the mean" in difference(path)


def test_a_model_that_was_replaced_after_the_run_is_found(tmp_path: Path) -> None:
    """Also by a forger of the checkpoint, the model and the manifest."""
    from fedsim.protocol.arrays import to_arrays, to_numpy
    from fedsim.runs.manifest import write_manifest
    from fedsim.runs.saved_model import read_model_card

    path = patched_run(lambda patch: None, tmp_path / "r")
    directory = RunDirectory.open(path)
    checkpoint = directory.read_checkpoint()
    assert checkpoint is not None
    values = {name: value + 1e-3 for name, value in to_numpy(checkpoint.state.arrays).items()}
    state = replace(checkpoint.state, arrays=to_arrays(values))
    directory.write_checkpoint(replace(checkpoint, state=state))
    directory.write_model(values, read_model_card(path).to_metadata())
    write_manifest(directory)
    assert verify_run(directory).problems == ()
    assert "the final model is not the one of the last round" in difference(path)


def test_an_engine_that_charges_less_is_found_by_both(tmp_path: Path) -> None:
    """More noise in the ledger than was added: `verify` knows the plan, the replay the charge."""
    charges = mechanism.DpSgdMechanism.charges

    def attack(patch: pytest.MonkeyPatch) -> None:
        def patched(self: Any, first: int, steps: int, **factor: float) -> Any:
            return charges(replace(self, noise_multiplier=3.0), first, steps, **factor)

        patch.setattr(mechanism.DpSgdMechanism, "charges", patched)

    with pytest.MonkeyPatch.context() as patch:
        attack(patch)
        run_experiment(EXPERIMENT, out=tmp_path / "r")
    directory = RunDirectory.open(tmp_path / "r")
    assert "not the charge that experiment.yaml plans" in str(verify_run(directory).problems)
    found = replay_run(directory).problems
    assert found[0] == "client 0, round 1: its charge is not that of its plan"


def test_without_an_attack_nothing_is_found(tmp_path: Path) -> None:
    path = patched_run(lambda patch: None, tmp_path / "r")
    found = CliRunner().invoke(cli, ["verify", str(path), "--replay"])
    assert found.exit_code == ExitCode.DONE
    assert "replayed: 2 rounds, 8 uploads, 8 charges" in found.stdout
