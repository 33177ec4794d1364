"""Distributed trust on SuperNodes: pinned parties, and a plan that every node's policy names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsim.federation.secure_setup import make_lasting_key

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix", reason="Flower's processes are POSIX"),
]
SECTIONS: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "iid", "num_clients": 3},
    },
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {
        "trust": {"name": "distributed", "colluding_clients": 1},
        "noise_multiplier": 2.0,
        "delta": 1e-4,
        "max_grad_norm": 0.5,
        "noise": "secure",
    },
}


def print_plan(policy: Path, app: Path) -> str:
    """Return the digest of the plan that `fedsim node-policy --plan` prints."""
    code = "from fedsim.cli import main; main()"
    named = [str(policy), "--plan", str(app / "fedsim_app" / "experiment.yaml")]
    command = [sys.executable, "-c", code, "node-policy", *named]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_known_parties_claim_the_sums_and_unknown_plans_are_refused(site, tmp_path: Path) -> None:
    keys = [make_lasting_key(site.home / f"{name}.key") for name in ("helper", 0, 1, 2)]
    pins = [key.fingerprint for key in keys]
    secure = {
        "min_clients": 3,
        "keys": {"helper_fingerprints": pins[:1], "client_fingerprints": pins[1:]},
    }
    experiment = site.written("shared", **SECTIONS, secure_aggregation=secure)
    app = site.deploy(experiment, "app")
    weaker = site.deploy(experiment, "weaker", "privacy.noise_multiplier=1.9", "seed=1")
    policy = site.home / "policy.yaml"
    content = {"max_epsilon": 3.0, "delta": 1e-4, "require_secure_noise": True}
    content |= {"helpers": pins[:1]}
    policy.write_text(json.dumps(content))
    policy.chmod(0o600)
    digest = print_plan(policy, app)
    policy.write_text(json.dumps({**content, "trust": "distributed", "plan_digests": [digest]}))
    out = tmp_path / "run"
    with site.running() as running:
        for client in range(3):
            key = site.home / f"{client}.key"
            running.start_node(client, nodes=4, client_key=key, policy=policy)
        running.start_node(3, nodes=4, helper_key=site.home / "helper.key")
        assert running.run_app(app, out) == "finished:completed", running.log()
        assert running.run_app(weaker, tmp_path / "weaker") == "finished:failed", running.log()
    found = json.loads((out / "privacy.json").read_text())
    assert found["secure_aggregation"]["plan_digest"] == digest
    assert set(found["secure_aggregation"]["trust"]["conditions"].values()) == {True}
    sums, server = found["certificates"]
    assert (sums["against"], server["against"]) == ("sums", "server")
    assert 0 < sums["epsilon"] < server["epsilon"]
    for client in range(3):
        node = site.home / f"node-{client}"
        records = (node / "data" / "code" / "ledger.jsonl").read_text().splitlines()
        charged = [json.loads(line) for line in records]
        assert [one["round"] for one in charged] == [1, 2], "the weaker plan was charged nothing"
        assert {one["trust"] for one in charged} == {"distributed"}
        assert all(one["ledger"] != one["against_server"] for one in charged)
    (record,) = (site.home / "node-3" / "helper-1").glob("*.json")
    assert json.loads(record.read_text())["server_round"] == 2
