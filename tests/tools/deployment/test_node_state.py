"""What a node keeps is for its user alone, and belongs to one experiment."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fedsim.experiment import Experiment, load_experiment
from fedsim.runs.files import SchemaError
from fedsim.tools.deployment.node_state import client_ledger, state_directory
from fedsim.tools.deployment.private_files import DeploymentError

EXPERIMENT: dict[str, Any] = {
    "name": "e",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "mlp"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


def experiment(**overrides: object) -> Experiment:
    return load_experiment(EXPERIMENT, overrides).experiment


def claimed(state: Path, asked: Experiment, client: int) -> Path:
    """Answer an experiment, as far as the node's files are concerned, and return the ledger."""
    return client_ledger(state, asked, client, claims_seed=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_everything_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ledger = claimed(tmp_path / "state", experiment(), 1)
        again = claimed(tmp_path / "state", experiment(), 1)
    finally:
        os.umask(before)
    assert again == ledger == tmp_path / "state" / "seed-0" / "client-1" / "ledger.jsonl"
    for path in (tmp_path / "state").rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert mode(tmp_path / "state") == 0o700


@posix
@pytest.mark.parametrize(
    ("opened", "permissions", "fix"),
    [
        ("state", 0o750, "chmod 700"),
        ("state/seed-0/client-1", 0o701, "chmod 700"),
        ("state/seed-0/client-1/ledger.jsonl", 0o640, "chmod 600"),
        ("state/seed-0/client-1/experiment.json", 0o604, "chmod 600"),
    ],
)
def test_what_others_can_open_is_refused(
    tmp_path: Path, opened: str, permissions: int, fix: str
) -> None:
    claimed(tmp_path / "state", experiment(), 1)
    (tmp_path / opened).chmod(permissions)
    with pytest.raises(DeploymentError, match=rf"other users \(mode {permissions:o}\): {fix} "):
        claimed(tmp_path / "state", experiment(), 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fedsim": "0.1.9"}, "was written by fedsim 0.1.9; .*continue with fedsim 0.1.9 on every"),
        ({"schema": 2}, r"experiment\.json of fedsim .* has schema 2, and .* reads schema 5"),
    ],
)
def test_the_state_of_another_version_or_schema_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    """Another version may draw other noise; another seed is another stream."""
    path = claimed(tmp_path / "state", experiment(), 1).with_name("experiment.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SchemaError, match=said):
        claimed(tmp_path / "state", experiment(), 1)
    assert claimed(tmp_path / "state", experiment(seed=1), 1).is_file()


@pytest.mark.parametrize("change", [{"local.steps": 2}, {"privacy.noise_multiplier": 2.0}])
def test_another_experiment_with_the_same_seed_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    claimed(tmp_path / "state", experiment(), 0)
    (key,) = change
    with pytest.raises(DeploymentError, match=f"differs in {key}: .* choose another seed"):
        claimed(tmp_path / "state", experiment(**change), 0)
    other = claimed(tmp_path / "state", experiment(seed=1, **change), 0)
    assert other.parent.parent.name == "seed-1"


def test_what_changes_no_noise_may_change(tmp_path: Path) -> None:
    first = claimed(tmp_path / "state", experiment(), 0)
    more = experiment(**{"federation.rounds": 5, "runtime.device": "cpu"})
    assert claimed(tmp_path / "state", more, 0) == first
    for number, target in enumerate(
        ({"target_epsilon": 8.0}, {"accountant": {"name": "pld", "target_rho": 0.5}})
    ):
        calibrated = {"privacy": {"delta": 1e-3, "max_grad_norm": 0.5, **target}}
        claimed(tmp_path / f"{number}", experiment(**calibrated), 0)
        with pytest.raises(DeploymentError, match=r"differs in federation\.rounds"):
            claimed(tmp_path / f"{number}", experiment(**calibrated, **{"federation.rounds": 5}), 0)


def test_where_the_state_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDSIM_STATE", raising=False)
    assert state_directory({}) == tmp_path / ".local" / "state" / "fedsim"
    monkeypatch.setenv("FEDSIM_STATE", "/srv/fedsim")
    assert state_directory({}) == Path("/srv/fedsim")
    assert state_directory({"state": "~/mine"}) == tmp_path / "mine"
    for wrong in ("here", ""):  # "" is a variable that a script did not set
        with pytest.raises(DeploymentError, match=r"state in --node-config: must be an absolute"):
            state_directory({"state": wrong})
