"""A node's policy on real processes: a SuperNode with `policy` in its --node-config."""

import json
import os
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix", reason="Flower's processes are POSIX"),
]


def test_a_supernode_answers_by_its_own_policy(site, tmp_path: Path) -> None:
    """One round is allowed and answered. Two are refused at node registration, by name."""
    policy = site.home / "policy.yaml"
    policy.write_text("{max_epsilon: 8.0, delta: 1.0e-5, max_rounds: 1}\n")
    policy.chmod(0o600)
    experiment = site.written("limited")
    allowed, refused = (
        site.deploy(experiment, f"app-{n}", f"federation.rounds={n}", f"seed={n}") for n in (1, 2)
    )
    with site.running() as running:
        for client in (0, 1):
            running.start_node(client, policy=policy)
        assert running.run_app(allowed, tmp_path / "run") == "finished:completed", running.log()
        assert running.run_app(refused, tmp_path / "more") == "finished:failed", running.log()
        log = running.log()
    assert "max_rounds is 1, and federation.rounds is 2: lower federation.rounds to 1" in log
    for client in (0, 1):
        node = site.home / f"node-{client}"
        assert not (node / "seed-2").exists(), "a refused experiment left something"
        (record,) = (node / "data" / "code" / "ledger.jsonl").read_text().splitlines()
        charged = json.loads((node / "seed-1" / f"client-{client}" / "ledger.jsonl").read_text())
        assert json.loads(record)["ledger"] == charged["ledger"]
