"""Digests of private examples test no guess without the key, which is in no run."""

import hashlib
import stat
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.core.errors import StorageError
from fedsim.data import load_federated_data
from fedsim.experiment import load_experiment
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.inputs import have_one_key, key_path, private_digest
from fedsim.runs.runner import run_experiment

EXPERIMENT: dict[str, Any] = {
    "name": "digest",
    "data": {"dataset": "iris", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, "noise": "secure"},
}


@pytest.fixture
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return key_path()


def test_equal_arrays_have_equal_digests_under_one_key_alone(
    own_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [np.arange(6.0).reshape(2, 3), np.zeros((0, 2))]
    first = private_digest(arrays)
    assert first == private_digest([arrays[0].copy(), arrays[1]])
    others = ([arrays[0].reshape(3, 2), arrays[1]], [arrays[0].astype("f4"), arrays[1]], arrays[:1])
    assert len({first, *map(private_digest, others)}) == 4
    assert stat.S_IMODE(own_key.stat().st_mode) == 0o600
    assert have_one_key(first, private_digest(arrays[:1]))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    second = private_digest(arrays)
    assert not have_one_key(first, second)
    assert first.partition(":")[2] != second.partition(":")[2]


def test_no_file_of_a_run_has_a_digest_that_follows_from_the_examples(
    own_key: Path, tmp_path: Path
) -> None:
    """Who knows every example, and so each guess, finds no digest of them in the directory."""
    run_experiment(EXPERIMENT, out=tmp_path / "r")
    loaded = load_experiment(EXPERIMENT)
    data = load_federated_data(
        loaded.experiment.data, seed=loaded.experiment.seed, base=loaded.base
    )
    arrays = [a for e in chain([data.test], data.clients) for a in (e.features, e.targets)]
    plain, text = hashlib.sha256(), b"".join(p.read_bytes() for p in (tmp_path / "r").rglob("*.*"))
    for array in arrays:  # as it was before
        for part in (f"{array.dtype}{array.shape}".encode(), array.tobytes()):
            plain.update(len(part).to_bytes(8, "little") + part)
    assert plain.hexdigest().encode() not in text
    assert private_digest(arrays).encode() in text
    assert own_key.read_bytes() not in text


def test_a_run_resumes_under_its_own_key(
    own_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_experiment(EXPERIMENT, out=tmp_path / "r")
    longer = {"federation.rounds": 2}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    with pytest.raises(RunDirectoryError, match=r"another key than .*data\.key.*copy its key here"):
        run_experiment(EXPERIMENT, overrides=longer, out=tmp_path / "r", resume=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run_experiment(EXPERIMENT, overrides=longer, out=tmp_path / "r", resume=True).rounds


def test_a_key_that_cannot_be_kept_is_one_line_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"set XDG_STATE_HOME to a folder") as refused:
        private_digest([np.zeros(1)])
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key_path().parent.mkdir()
    key_path().write_bytes(b"short")
    with pytest.raises(StorageError, match=r"is damaged: it has 5 bytes, not 32"):
        private_digest([np.zeros(1)])
