"""A run leaves its report, whatever its end."""

import pydoc
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.comparison import worker
from fedsim.report.run import run
from fedsim.runs.runner import RunFailedError

FAILING: dict[str, Any] = {
    "name": "failing",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": None,
    "faults": [{"kind": "dropout_before"}],
}


def test_a_failed_run_has_a_report(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="every client failed"):
        run(FAILING, out=tmp_path / "run")
    assert "failing" in (tmp_path / "run" / "report.html").read_text()


def test_a_failed_run_of_a_comparison_has_a_report(tmp_path: Path) -> None:
    job = {
        "directory": str(tmp_path / "run"),
        "record": {},
        "action": "run",
        "experiment": FAILING,
        "base": str(tmp_path),
        "measure": False,
    }
    with pytest.raises(RunFailedError, match="every client failed"):
        worker._execute(job, lambda message: None)
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_help_alone_shows_the_way_from_the_imports_to_the_result() -> None:
    """The example runs in tests/test_examples.py."""
    text = pydoc.plain(pydoc.render_doc(fedsim.run))
    parts = ("import fedsim", '"model": {"name": build', "result = fedsim.run(", "rounds_frame()")
    assert sorted(parts, key=text.index) == list(parts)
