"""Distributed trust on every engine: one result, also after an interruption, and one set a sum."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.federation.secure_setup import make_lasting_key
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.runs.verification import verify_run

EXPERIMENT: dict[str, Any] = {
    "name": "shared-noise",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 6, "min_examples": 20},
    },
    "model": {"name": "mlp", "args": {"hidden": [50]}},  # a larger one is probed in fewer rounds
    "federation": {"rounds": 3, "weighting": "examples"},
    "local": {"steps": 1, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "trust": {"name": "distributed", "colluding_clients": 1},
        "noise_multiplier": 3.0,
        "delta": 1e-3,
        "max_grad_norm": 0.5,
    },
    "secure_aggregation": {"min_clients": 4},
    "faults": [
        {"kind": "dropout_after", "clients": [1], "rounds": [2]},
        {"kind": "dropout_after", "clients": [0, 5], "rounds": [3]},
    ],
}
SAME = ("model.safetensors", "privacy.json", "clients.csv")


def survivors(run: Path) -> list[int]:
    rows = map(json.loads, (run / "rounds.jsonl").read_text().splitlines())
    return [row["secure_aggregation"]["survivors"] for row in rows]


def assert_same(one: Path, other: Path, names: tuple[str, ...] = SAME) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    ledgers = [sorted((run / "ledger.jsonl").read_text().splitlines()) for run in (one, other)]
    assert ledgers[0] == ledgers[1]


def test_fewer_survivors_than_planned_open_no_sum_and_stay_charged(tmp_path: Path) -> None:
    faults = [{"kind": "dropout_after", "clients": [0, 1, 5], "rounds": [2]}]
    skips = {**EXPERIMENT, "faults": faults}
    skips["secure_aggregation"] = {"min_clients": 4, "on_abort": "skip_round"}
    result = run_experiment(skips, out=tmp_path / "skips")
    assert survivors(result.path) == [6, 0, 6]
    assert result.privacy is not None
    assert {spend.rounds for spend in result.privacy.clients} == {3}
    assert not verify_run(RunDirectory.open(result.path)).problems
    with pytest.raises(RunFailedError, match="TooFewClientsError: round 2: 3 clients are left"):
        run_experiment({**EXPERIMENT, "faults": faults}, out=tmp_path / "raises")


def test_an_interrupted_run_ends_as_the_whole_one(
    tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    whole = run_experiment(EXPERIMENT, out=tmp_path / "whole")
    assert survivors(whole.path) == [6, 5, 4]
    cut = run_experiment(EXPERIMENT, out=tmp_path / "cut", callback=stop_after(1))
    assert cut.status == "interrupted"
    again = run_experiment(EXPERIMENT, out=tmp_path / "cut", resume=True)
    assert_same(whole.path, again.path)
    assert not verify_run(RunDirectory.open(again.path)).problems


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_all_engines_open_the_same_sums(tmp_path: Path) -> None:
    """Flower's engine trains clients alone: its bits agree with `vectorized_clients: off`."""
    for engine, vectorized_clients in (("ray", "auto"), ("flower", "off")):
        local, other = (
            run_experiment(
                EXPERIMENT,
                overrides={"local.vectorized_clients": vectorized_clients, **runtime},
                out=tmp_path / f"{engine}-{number}",
            ).path
            for number, runtime in enumerate(({}, {"runtime.engine": engine, "runtime.workers": 2}))
        )
        assert survivors(local) == survivors(other) == [6, 5, 4]
        assert_same(local, other)


@pytest.mark.slow
def test_pinned_clients_and_helpers_give_the_same_run(
    tmp_path: Path, weights_of: Callable[[Path], dict[str, bytes]]
) -> None:
    """A client whose key file holds another key is left out before it is charged."""
    files = [tmp_path / f"{name}.key" for name in ("helper", *map(str, range(6)))]
    pins = [make_lasting_key(file).fingerprint for file in files]
    keys = {
        "helper_fingerprints": pins[:1],
        "helper_files": [str(files[0])],
        "client_fingerprints": pins[1:],
        "client_files": list(map(str, files[1:])),
    }
    pinned = {**EXPERIMENT, "secure_aggregation": {"min_clients": 4, "keys": keys}}
    plain = run_experiment(EXPERIMENT, out=tmp_path / "plain")
    result = run_experiment(pinned, out=tmp_path / "pinned")
    assert_same(plain.path, result.path, names=("clients.csv",))
    assert weights_of(plain.path) == weights_of(result.path)
    found = json.loads((result.path / "privacy.json").read_text())["secure_aggregation"]["trust"]
    assert set(found["conditions"].values()) == {True}
    swapped = [*files[1:3], files[4], files[3], *files[5:]]
    wrong = {**keys, "client_files": list(map(str, swapped))}
    left = run_experiment(
        {**pinned, "secure_aggregation": {"min_clients": 4, "keys": wrong}, "faults": []},
        out=tmp_path / "swapped",
    )
    reasons = {one["client"]: one["reason"] for one in left.rounds[0]["failed"]}
    assert set(reasons) == {2, 3}
    assert all("PublicKeyError: the lasting key of client" in text for text in reasons.values())
    assert left.privacy is not None
    assert [spend.rounds for spend in left.privacy.clients] == [3, 3, 0, 0, 3, 3]
