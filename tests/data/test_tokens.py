"""Whole numbers stay whole where the experiment says that they are tokens, and only there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import DataError
from fedsim.data.examples import to_dataset
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.runs.runner import run_experiment

MODEL = """
from torch import nn

def build(words=12):
    return nn.Sequential(nn.Embedding(words, 4), nn.Flatten(), nn.Linear(20, 2))
"""


def sentences(n: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """Five words of twelve; the first decides."""
    words = np.random.default_rng(0).integers(0, 12, (n, 5))
    return words, (words[:, 0] >= 6).astype(np.int64)


def experiment(folder: Path, **sections: Any) -> dict[str, Any]:
    words, classes = sentences()
    np.savez(folder / "words.npz", x=words, y=classes)
    (folder / "model.py").write_text(MODEL)
    return {
        "name": "words",
        "data": {
            "dataset": {"path": "words.npz", "target": "y"},
            "features": "tokens",
            "partition": {"scheme": "iid", "num_clients": 2},
        },
        "model": {"name": "./model.py:build"},
        "federation": {"rounds": 12},
        "local": {"steps": 10, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 1.0}},
        **sections,
    }


@pytest.mark.parametrize("private", [False, True])
def test_an_embedding_learns_from_a_file_of_tokens(tmp_path: Path, private: bool) -> None:
    privacy = {"noise_multiplier": 0.6, "delta": 1e-3, "max_grad_norm": 1.0}
    sections = experiment(tmp_path, privacy=privacy if private else None)
    result = run_experiment(sections, base=tmp_path, out=tmp_path / "run")
    assert result.metrics["test_accuracy"] > (0.75 if private else 0.95)
    rows = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert not any(json.loads(row)["failed"] for row in rows)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.float32, np.float64, bool])
def test_tokens_of_any_type_become_int64(kind: type) -> None:
    x = np.array([[0, 1], [1, 0]]).astype(kind)
    examples = to_dataset(x, [0, 1], tokens=True).train
    assert examples.features.dtype == np.int64
    assert examples.features.tolist() == [[0, 1], [1, 0]]
    assert to_dataset(x, [0, 1]).train.features.dtype == np.float32


def test_a_table_of_tokens(read_file: Any, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\n3,16777217,0\n5,1,1\n")
    features = read_file(tmp_path / "t.csv", "y", tokens=True).train.features
    assert features.tolist() == [[3, 16777217], [5, 1]], "float32 would have made it 16777216"


@pytest.mark.parametrize("wrong", [-1, 0.5, np.nan, 2.0**40])
def test_what_is_no_token_is_refused_by_its_value(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(DataError, match=r"tokens must be whole numbers from 0 .* in x;"):
        to_dataset(np.array([[1, 2], [3, wrong]]), [0, 1], tokens=True)


def test_built_in_models_and_data_take_no_tokens(tmp_path: Path) -> None:
    sections = experiment(tmp_path, model={"name": "mlp"})
    with pytest.raises(ExperimentError, match=r"the built-in model 'mlp' takes numbers"):
        load_experiment(sections, base=tmp_path)
    sections["data"]["dataset"] = "digits"
    with pytest.raises(ExperimentError, match=r"data.features: digits has numbers, no tokens"):
        load_experiment(sections, base=tmp_path)
