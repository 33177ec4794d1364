"""Declared metrics: the mean over clients comes out of the sum, and no client's goes in clear."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.data import Examples
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.trained_model import TrainMetrics
from fedsim.protocol.arrays import to_arrays
from fedsim.report.html import write_report
from fedsim.runs.directory import RunDirectory

BOUNDS = {"train_loss": 5.0, "train_accuracy": 1.0}
PROTOCOLS: list[dict[str, Any]] = [{"aggregators": 2}, {"protocol": "secagg"}]


def means(result: Any) -> list[tuple[float, ...]]:
    return [tuple(row[name] for name in BOUNDS) for row in result.rounds]


@pytest.mark.parametrize("secure", PROTOCOLS, ids=str)
def test_means_of_metrics_equal_those_in_clear_bit_for_bit(
    lab: Any, tmp_path: Path, secure: dict[str, Any]
) -> None:
    result = lab.run(tmp_path, {**secure, "metrics": BOUNDS}, faults=lab.faults)
    control = lab.control({**lab.quantized, "metrics": BOUNDS}, faults=lab.faults)
    lab.same_result(result, control)
    assert means(result) == means(control)
    lab.same_result(result, lab.control(lab.quantized, faults=lab.faults))  # they change no model


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_means_are_those_of_the_clients_own_measurements(
    lab: Any, tmp_path: Path, weighting: str
) -> None:
    """By hand: the loss of the model that each round starts from, on every client's examples."""
    federation = {"rounds": 2, "weighting": weighting}
    secure = {"metrics": BOUNDS}
    first = lab.control(secure, federation={"rounds": 1, "weighting": weighting})
    result = lab.run(tmp_path, secure, federation=federation)
    plain = assemble(load_experiment(lab.experiment(secure, federation=federation)), ledger=None)
    starts = [plain.initial_arrays(), to_arrays(lab.model(first.path))]
    for start, found in zip(starts, means(result), strict=True):
        plain.model.module.load_state_dict(start.to_torch_state_dict())
        rows = []
        for own in plain.data.clients:
            targets = torch.from_numpy(own.targets)
            outputs = plain.model.module(torch.from_numpy(own.features))
            loss = torch.nn.functional.cross_entropy(outputs, targets).item()
            rows.append((loss, (outputs.argmax(1) == targets).double().mean().item()))
        sizes = [len(own) if weighting == "examples" else 1 for own in plain.data.clients]
        for value, column in zip(found, zip(*rows, strict=True), strict=True):
            mean = sum(s * one for s, one in zip(sizes, column, strict=True)) / sum(sizes)
            assert value == pytest.approx(mean, rel=1e-6)  # float32 losses, batched otherwise
    assert [row["secure_aggregation"]["clipped_metrics"] for row in result.rounds] == [0, 0]


def test_metrics_do_not_depend_on_where_the_examples_lie_in_memory(lab: Any) -> None:
    federation = assemble(load_experiment(lab.experiment({"metrics": BOUNDS})), ledger=None)
    measure = federation.client_task(0).scores.measure
    assert isinstance(measure, TrainMetrics)
    found, own = set(), measure.examples()
    for offset in range(0, 64, 4):
        features = own.features
        room = np.empty(features.nbytes + 128, np.uint8)
        start = -room.ctypes.data % 64 + offset
        moved = room[start : start + features.nbytes].view(np.float32).reshape(features.shape)
        moved[:] = features
        there = partial(Examples, moved, own.targets)
        found.add(tuple(replace(measure, examples=there)(federation.model.module).values()))
    assert len(found) == 1


def test_what_is_clipped_is_counted_and_a_lost_round_has_no_mean(lab: Any, tmp_path: Path) -> None:
    protocol = {"name": "additive", "combine_retries": 0}
    secure = {"metrics": {"train_loss": 0.5}, "on_abort": "skip_round", "protocol": protocol}
    wire = lab.wire(lab.loses("secagg_combine", [lab.clients], [2]))
    result = lab.run(tmp_path, secure, wire)
    assert [row["train_loss"] for row in result.rounds] == [0.5, None]
    clipped = [row["secure_aggregation"]["clipped_metrics"] for row in result.rounds]
    assert clipped == [lab.clients, 0]


def test_the_page_draws_them_and_the_record_says_that_the_server_saw_sums(
    lab: Any, tmp_path: Path
) -> None:
    result = lab.run(tmp_path, {"metrics": BOUNDS})
    write_report(RunDirectory(result.path))
    page = (result.path / "report.html").read_text()
    assert "Train loss" in page
    assert "Train accuracy" in page
    said = json.loads((result.path / "privacy.json").read_text())["secure_aggregation"]
    assert {"sum of weighted train_loss", "sum of weighted train_accuracy"} < set(
        said["server_view"]
    )


def test_metrics_of_private_examples_are_refused(lab: Any, tmp_path: Path) -> None:
    """No ε covers them: neither the noise of updates nor hiding in a sum makes them private."""
    with pytest.raises(ExperimentError, match="no ε covers them or their sum; remove metrics"):
        lab.run(tmp_path / "r", {"metrics": BOUNDS}, privacy=lab.privacy)
    assert not (tmp_path / "r").exists()


def test_a_private_clients_task_has_nothing_to_measure(lab: Any) -> None:
    """A second barrier, for settings that reach a client past the rules of the file."""
    loaded = load_experiment(lab.experiment({}, privacy=lab.privacy))
    secure = loaded.experiment.secure_aggregation
    assert secure is not None
    smuggled = secure.model_copy(update={"metrics": BOUNDS})
    forged = loaded.experiment.model_copy(update={"secure_aggregation": smuggled})
    federation = assemble(type(loaded)(experiment=forged, path=None, base=loaded.base), ledger=None)
    assert federation.client_task(0).scores.measure is None


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": 1.0}, "no such metric; choose from train_loss, train_accuracy, train_mse"),
        ({"train_mse": 1.0}, "this task has no 'train_mse'; choose from train_loss, train_acc"),
        ({"train_loss": 1e15}, "metric 'train_loss' with bound 1000000000000000.0 does not fit"),
    ],
)
def test_metrics_that_there_are_not_are_refused_before_the_run(
    lab: Any, tmp_path: Path, metrics: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        lab.run(tmp_path / "r", {"metrics": metrics})
    assert not (tmp_path / "r").exists()
