"""A result prints short, shows its report's head in a notebook, and gives tables."""

import builtins
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.core.errors import InputError
from fedsim.report.run import render_head
from fedsim.runs.client_columns import client_columns
from fedsim.runs.run_result import MissingPandasError
from fedsim.tracking.callbacks import row_numbers

EXPERIMENT = {
    "name": "shown",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": 32},
    "privacy": {
        "noise_multiplier": 1.0,
        "delta": 1e-4,
        "max_grad_norm": 1.0,
        "clients": {"1": {"noise_multiplier": 0.0}},
    },
}
BOUNDED = {"privacy.clients": {}}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedsim.RunResult:
    return fedsim.run(EXPERIMENT, overrides=BOUNDED, out=tmp_path_factory.mktemp("r") / "bounded")


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory: pytest.TempPathFactory) -> fedsim.RunResult:
    return fedsim.run(EXPERIMENT, out=tmp_path_factory.mktemp("r") / "unbounded")


def test_a_result_prints_its_end_its_metrics_and_the_guarantee(
    result: fedsim.RunResult, unbounded: fedsim.RunResult
) -> None:
    text = repr(result)
    assert text.startswith(f"RunResult('{result.path}': completed after 2 rounds, test_loss ")
    assert "every client within ε = " in text
    assert repr(result.privacy).startswith("PrivacySummary(3 clients: every client within ε = ")
    assert len(text) < 250 + len(str(result.path))
    assert "no guarantee for the federation: ε = ∞ for client 1" in repr(unbounded)


def test_a_notebook_shows_the_head_of_the_report(result: fedsim.RunResult) -> None:
    page = result._repr_html_()
    for text in ("Guarantee", "ε ≤ ", "report.html", "completed", "Test accuracy", "<sub>k</sub>"):
        assert text in page
    assert "<script" not in page


def test_the_head_escapes_what_files_say(
    result: fedsim.RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.report import run

    read = run.read_contents

    def with_markup(directory: Any) -> Any:
        contents = read(directory)
        contents.summary["name"] = "<script>alert(1)</script>"
        return contents

    monkeypatch.setattr(run, "read_contents", with_markup)
    assert "<script" not in render_head(result.path)


def test_a_result_whose_files_are_gone_still_prints(result: fedsim.RunResult) -> None:
    from dataclasses import replace

    assert "RunResult(" in replace(result, path=Path("gone"))._repr_html_()
    assert pickle.loads(pickle.dumps(result)) == result


def test_rounds_as_a_table(result: fedsim.RunResult) -> None:
    table = result.rounds_frame()
    assert list(table.index) == [1, 2]
    assert float(table["test_accuracy"].tolist()[-1]) == result.metrics["test_accuracy"]
    assert list(table["participants"]) == [3, 3]
    assert sum(table["timeline.train"].tolist()) == pytest.approx(
        sum(row["timeline"]["train"] for row in result.rounds)
    )


def test_clients_as_a_table(result: fedsim.RunResult, unbounded: fedsim.RunResult) -> None:
    assert result.privacy is not None
    table = result.clients_frame()
    assert list(table.index) == [0, 1, 2]
    assert max(table["epsilon"].tolist()) == result.privacy.system_epsilon
    assert unbounded.clients_frame()["epsilon"].tolist()[1] == math.inf


def test_a_figure_shows_in_a_cell_and_is_saved(result: fedsim.RunResult, tmp_path: Path) -> None:
    for metric, words in ((None, "Test accuracy"), ("test_loss", "loss"), ("epsilon_max", "ε")):
        drawn = result.figure(metric)._repr_svg_()
        title = drawn.partition("<title>")[2].partition("</title>")[0]
        assert words in title
        assert "round 2" in title
    result.figure().save(tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        InputError, match=r"no numbers of 'loss' to draw; it has test_loss, test_accuracy"
    ):
        result.figure("loss")


def test_names_of_clients_are_a_column_where_there_are_some() -> None:
    named, unnamed = client_columns([{"client": 0, "name": "north"}]), client_columns([{}])
    assert [column.name for column in named[:3]] == ["client", "name", "examples"]
    assert [column.name for column in unnamed[:2]] == ["client", "examples"]


def test_numbers_of_a_row() -> None:
    row = {
        "round": 3,
        "participants": [4, 7],
        "epsilon_max": None,
        "clip_norm": {"min": 1.0, "median": 2.0, "max": 3.0},
        "test_recall_per_class": [0.5, 1.0],
    }
    assert row_numbers(row) == {
        "round": 3,
        "participants": 2,
        "clip_norm.min": 1.0,
        "clip_norm.median": 2.0,
        "clip_norm.max": 3.0,
        "test_recall_per_class.0": 0.5,
        "test_recall_per_class.1": 1.0,
    }


@pytest.mark.parametrize("method", ["rounds_frame", "clients_frame"])
def test_without_pandas_a_message_names_it(
    result: fedsim.RunResult, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    load: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return load(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPandasError, match="pip install pandas"):
        getattr(result, method)()
