"""A client that fails again and again is named with its reason, wherever a run speaks."""

import io
from pathlib import Path

from rich.console import Console

import fedsim
from fedsim.report.progress import ProgressCallback
from fedsim.report.terminal import print_result
from fedsim.runs.directory import RunDirectory
from fedsim.runs.verification import verify_run

REASON = "dropped out during training (injected)"
EXPERIMENT = {
    "name": "failing",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 5},
    "local": {"steps": 1, "batch_size": 16},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    "faults": [
        {"kind": "dropout_during", "clients": [1]},
        {"kind": "dropout_during", "clients": [2], "rounds": [1, 2]},
    ],
}


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def text_of(printed: Console) -> str:
    assert isinstance(printed.file, io.StringIO)
    return printed.file.getvalue()


def test_a_client_that_fails_the_same_way_three_times_is_named_everywhere(tmp_path: Path) -> None:
    progress, result = console(), console()
    fedsim.run(EXPERIMENT, out=tmp_path / "run", callback=ProgressCallback(progress))
    directory = RunDirectory(tmp_path / "run")

    lines = [line for line in text_of(progress).splitlines() if "client 1 failed" in line]
    assert lines == [
        f"round 1: client 1 failed: {REASON}",
        f"round 2: client 1 failed: {REASON}",
        "warning: client 1 failed in 3 rounds with the same reason (later rounds like these are "
        f"counted in the report): {REASON}",
    ]
    repeated = [{"client": 1, "rounds": 5, "reason": REASON}]
    assert directory.read_json("summary.json")["repeated_failures"] == repeated
    print_result(directory, result)
    assert f"client 1 failed in 5 rounds and never took part: {REASON}" in text_of(result)
    assert "client 2 failed in" not in text_of(result)
    page = directory.report.read_text()
    assert "Client 1 never took part: every update of its rounds was lost." in page
    assert "lients 1, 2 never took part" not in page
    assert verify_run(directory).problems == ()

    # A summary that hides the client does not verify.
    summary = directory.read_json("summary.json")
    del summary["repeated_failures"]
    directory.write_json("summary.json", summary)
    told = [str(problem) for problem in verify_run(directory).problems]
    assert any("repeated failures of summary.json" in problem for problem in told)
