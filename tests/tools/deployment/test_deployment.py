"""A federation of real processes on localhost: one SuperLink, two SuperNodes, `flwr run`."""

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Flower's processes are POSIX")


@pytest.mark.slow
def test_two_supernodes_give_the_local_result_also_over_a_restart(site, tmp_path: Path) -> None:
    """Round 1, a power cut on both nodes, and round 2: the bits and ledgers of one local run."""
    private = site.written("private")
    local = run_experiment(private, overrides={"federation.rounds": 2}, out=tmp_path / "local")
    first, second = (site.deploy(private, f"app-{n}", f"federation.rounds={n}") for n in (1, 2))
    home, out = site.home, tmp_path / "run"
    with site.running() as running:
        nodes = [running.start_node(client) for client in (0, 1)]
        assert running.run_app(first, out) == "finished:completed", running.log()
        assert len((out / "rounds.jsonl").read_text().splitlines()) == 1
        for node in nodes:
            running.stop(node)
        shutil.rmtree(home / "flwr" / "apps", ignore_errors=True)
        for client in (0, 1):
            running.start_node(client)
        assert running.run_app(second, out) == "finished:completed", running.log()
        for name in ("model.safetensors", "privacy.json", "clients.csv"):
            assert (out / name).read_bytes() == (local.path / name).read_bytes(), name
        for client in (0, 1):
            ledger = home / f"node-{client}" / "seed-0" / f"client-{client}" / "ledger.jsonl"
            assert stat.S_IMODE(ledger.stat().st_mode) == 0o600
            own = [line for line in site.ledger(local.path) if json.loads(line)["client"] == client]
            assert ledger.read_text().splitlines() == own
        assert sorted(site.ledger(out)) == sorted(site.ledger(local.path))
        assert verify_run(RunDirectory(out)).problems == ()


@pytest.mark.long  # simulated clients evaluate alike: tests/runs/test_client_evaluation.py
def test_clients_on_supernodes_evaluate_as_in_a_simulation(site, tmp_path: Path) -> None:
    """Without privacy; they train together in the simulation, so models agree within rounding."""
    together = {"steps": 2, "batch_size": 32}
    open_book = site.written(
        "open", privacy=None, seed=1, evaluation={"holdout": 0.2}, local=together
    )
    app, out = site.deploy(open_book, "app"), tmp_path / "evaluated"
    policy = site.home / "policy.yaml"
    policy.write_text("require_privacy: false\n")
    policy.chmod(0o600)
    simulated = run_experiment(open_book, out=tmp_path / "simulated").path
    with site.running() as running:
        for client in (0, 1):
            running.start_node(client, policy=policy)
        assert running.run_app(app, out) == "finished:completed", running.log()
    models = [load_file(run / "model.safetensors") for run in (out, simulated)]
    for name, value in models[1].items():
        np.testing.assert_allclose(models[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    found, expected = (
        json.loads((run / "rounds.jsonl").read_text().splitlines()[-1]) for run in (out, simulated)
    )
    assert found["evaluated"] == expected["evaluated"]
    for name in ("clients_loss", "clients_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
