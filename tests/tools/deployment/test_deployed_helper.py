"""Secure aggregation on real processes: two clients and a pinned helper, each on its own node."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.federation.secure_setup import make_lasting_key
from fedsim.runs.runner import run_experiment

pytestmark = [
    pytest.mark.long,  # nodes alone: test_deployment.py; helpers alone: tests/runs/secure
    pytest.mark.skipif(os.name != "posix", reason="Flower's processes are POSIX"),
]


def test_a_pinned_helper_on_a_supernode_opens_the_sum_of_the_local_run(
    site, tmp_path: Path, weights_of: Callable[[Path], dict[str, bytes]]
) -> None:
    """Two clients and a helper, each on its own node: the bits of a simulation, and its charges."""
    key = make_lasting_key(site.home / "helper.key")
    experiment = site.written(
        "hidden",
        privacy={"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
        secure_aggregation={
            "aggregators": 2,
            "min_clients": 2,
            "keys": {"helper_fingerprints": [key.fingerprint]},
        },
    )
    files = {"secure_aggregation.keys.helper_files": [str(site.home / "helper.key")]}
    local = run_experiment(experiment, overrides=files, out=tmp_path / "local")
    app, out = site.deploy(experiment, "app"), tmp_path / "run"
    with site.running() as running:
        for client in (0, 1):
            running.start_node(client, nodes=3)
        running.start_node(2, nodes=3, helper_key=site.home / "helper.key")
        assert running.run_app(app, out) == "finished:completed", running.log()
    assert (out / "clients.csv").read_bytes() == (local.path / "clients.csv").read_bytes()
    assert weights_of(out) == weights_of(local.path)
    assert sorted(site.ledger(out)) == sorted(site.ledger(local.path))
    limits = [
        {
            point["id"]
            for point in json.loads((run / "privacy.json").read_text())["statement_points"]
        }
        for run in (out, local.path)
    ]
    assert limits[1] - limits[0] == {"parties_on_one_host"}, "here the parties are real"
    assert "unseen_updates" in limits[0] & limits[1]
    assert not (site.home / "node-2" / "seed-0").exists(), "a helper keeps no ledger"
