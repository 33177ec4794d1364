"""A comparison as a whole: paired runs, reuse, interruption, and runs that fail."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from scipy import stats

import fedsim
from fedsim.cli import main
from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.jobs import plan_jobs
from fedsim.comparison.load import load_comparison
from fedsim.comparison.worker import WARNING, write_client_metrics
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import SchemaError
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

LONG = 60  # rounds
# The background jobs of a shell ignore Ctrl-C, and so would what they start.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
FEDSIM = [sys.executable, "-c", HEED_INTERRUPTS + "from fedsim.cli import main; main()"]


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Perform a command in the directory; return its exit code, output and messages."""
    monkeypatch.chdir(directory)

    def perform(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return perform


def source_of(result: ComparisonResult) -> Path:
    return result.path.parent / "compare.yaml"


def test_there_is_a_run_for_every_variant_and_seed(compared: ComparisonResult) -> None:
    found = sorted(path.relative_to(compared.path).as_posix() for path in runs(compared.path))
    assert found == [
        f"runs/{variant}/seed-{seed}" for variant in ("dp", "plain") for seed in (0, 1)
    ]
    assert not compared.interrupted
    assert not compared.failed


def runs(out: Path) -> list[Path]:
    return [path.parent for path in out.glob("runs/*/*/summary.json")]


def test_a_comparison_prints_short_and_is_a_table_in_a_notebook(
    compared: ComparisonResult,
) -> None:
    text, page = repr(compared), compared._repr_html_()
    assert text.startswith(f"ComparisonResult('{compared.path}': test accuracy, ")
    assert len(text) < 400 + len(str(compared.path))
    for variant in compared.results.variants:
        assert f"{variant.name} " in text
        assert f"<td>{variant.name}</td>" in page
    names = [replace(one, name="<script>") for one in compared.results.variants]
    other = replace(compared, results=replace(compared.results, variants=tuple(names)))
    assert "<script" not in other._repr_html_()


@pytest.mark.slow  # five seconds
def test_a_run_of_a_worker_process_is_the_one_that_fedsim_run_makes(
    compared: ComparisonResult, directory: Path
) -> None:
    source = directory / "compare.yaml"
    source.write_text(source.read_text().replace("seeds: 2", "seeds: [1]"))
    worked = fedsim.compare(source, out=directory / "out", workers=1).path
    base = directory / "tiny.yaml"
    alone = run_experiment(base, overrides={"seed": 1}, out=directory / "alone").path
    for name in ("model.safetensors", "ledger.jsonl"):
        for found in (worked, compared.path):
            ours = found / "runs" / "dp" / "seed-1" / name
            assert ours.read_bytes() == (alone / name).read_bytes()


def test_the_table_of_runs_gives_the_reported_difference_again(compared: ComparisonResult) -> None:
    with (compared.path / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = {
        name: [float(row["test_accuracy"]) for row in rows if row["variant"] == name]
        for name in ("plain", "dp")
    }
    content = json.loads((compared.path / "comparison.json").read_text())
    reported = content["variants"][1]["difference"]
    expected = stats.ttest_rel(values["dp"], values["plain"])
    assert reported["mean"] == pytest.approx(np.mean(values["dp"]) - np.mean(values["plain"]))
    assert reported["t_p"] == pytest.approx(expected.pvalue)
    assert [reported["low"], reported["high"]] == pytest.approx(
        list(expected.confidence_interval(0.95))
    )
    assert content["baseline"] == "plain"
    assert content["variants"][0]["difference"] is None
    assert content["variants"][1]["epsilon"] <= 8


def test_variants_with_one_seed_share_data_model_and_participants(
    compared: ComparisonResult,
) -> None:
    assert compared.results.pair_check.is_paired
    digests = [
        json.loads((path / "comparison_run.json").read_text())["pairing"]
        for path in runs(compared.path)
    ]
    assert len({one["data"] for one in digests}) == 2  # one for each seed


def test_client_metrics_are_the_final_model_on_each_clients_data_and_marked_private(
    compared: ComparisonResult,
) -> None:
    from fedsim.experiment import load_experiment
    from fedsim.federation.assembly import assemble

    path = compared.path / "runs" / "plain" / "seed-0"
    content = json.loads((path / "client_metrics.json").read_text())
    assert content["private"] is True
    assert content["warning"] == WARNING
    federation = assemble(load_experiment(path / "experiment.yaml"), ledger=None)
    from safetensors.torch import load_file

    federation.model.module.load_state_dict(load_file(path / "model.safetensors"))
    for row, examples in zip(content["clients"], federation.data.clients, strict=True):
        guesses = federation.model.module(torch.from_numpy(examples.features)).argmax(dim=1).numpy()
        assert row["client_accuracy"] == pytest.approx(float((guesses == examples.targets).mean()))
    report = (path / "report.html").read_text()
    assert "client_accuracy" not in report
    assert "client_accuracy" not in (path / "rounds.jsonl").read_text()


def test_clients_with_models_of_their_own_are_measured_by_them(directory: Path) -> None:
    """`test_accuracy` of such a run is the mean over these models, too, and not of their mean."""
    from fedsim.experiment import load_experiment
    from fedsim.federation.assembly import assemble

    alone = {"federation.strategy": "local_only", "privacy": None, "local.optimizer.lr": 5.0}
    run = RunDirectory(
        run_experiment(directory / "tiny.yaml", overrides=alone, out=directory / "r").path
    )
    federation = assemble(load_experiment(run.path / "experiment.yaml"), ledger=None)
    write_client_metrics(federation, run)
    checkpoint = run.read_checkpoint()
    assert checkpoint is not None
    models = federation.scored_models(checkpoint.state)
    assert not isinstance(models, ArrayRecord)
    rows = run.read_json("client_metrics.json")["clients"]
    assert len(rows) == len(models) == 3
    for row, model, examples in zip(rows, models, federation.data.clients, strict=True):
        federation.model.module.load_state_dict(model.to_torch_state_dict())
        guesses = federation.model.module(torch.from_numpy(examples.features)).argmax(dim=1)
        expected = (guesses.numpy() == examples.targets).mean()
        assert row["client_accuracy"] == pytest.approx(float(expected))
    assert not verify_run(run).problems


@pytest.mark.usefixtures("jobs_here")
def test_without_client_metrics_none_are_expected(directory: Path) -> None:
    source = directory / "compare.yaml"
    text = source.read_text()
    assert "client_metrics: true\n" in text
    source.write_text(text.replace("client_metrics: true\n", "").replace("seeds: 2", "seeds: 1"))
    result = fedsim.compare(source, out=directory / "out")
    assert not result.failed
    assert list((directory / "out").rglob("client_metrics.json")) == []


def test_a_second_call_runs_nothing_and_says_the_same(
    compared: ComparisonResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # no worker can start
    before = {path: path.stat().st_mtime_ns for path in compared.path.glob("runs/*/*/*")}
    again = fedsim.compare(source_of(compared), out=compared.path)
    assert all(outcome.reused for outcome in again.results.outcomes)
    assert before == {path: path.stat().st_mtime_ns for path in compared.path.glob("runs/*/*/*")}
    first, second = (
        [variant.metrics for variant in result.results.variants] for result in (compared, again)
    )
    assert first == second


def test_only_what_changed_is_to_be_run_again(
    compared: ComparisonResult, directory: Path, tmp_path: Path
) -> None:
    loaded = load_comparison(tmp_path / "compare.yaml")
    actions = {(job.variant, job.action) for job in plan_jobs(loaded, compared.path)}
    assert actions == {("plain", "reuse"), ("dp", "reuse")}
    base = tmp_path / "tiny.yaml"
    base.write_text(base.read_text().replace("delta: 1.0e-4", "delta: 1e-5"))
    copy = tmp_path / "copy"
    (copy / "runs").mkdir(parents=True)
    (copy / "comparison.yaml").touch()
    for path in runs(compared.path):
        target = copy / path.relative_to(compared.path)
        target.mkdir(parents=True)
        for file in path.glob("*.*"):
            (target / file.name).write_bytes(file.read_bytes())
    jobs = plan_jobs(load_comparison(tmp_path / "compare.yaml"), copy)
    assert {(job.variant, job.action) for job in jobs} == {("plain", "reuse"), ("dp", "run")}
    # Nothing is overwritten: what the former runs spent is still on record.
    assert (copy / "superseded" / "dp" / "seed-0-1" / "ledger.jsonl").is_file()
    assert not (copy / "runs" / "dp" / "seed-0").exists()


@pytest.mark.usefixtures("jobs_here")
def test_a_finished_run_with_a_number_that_is_not_finite_is_finished_anew(
    compared: ComparisonResult, tmp_path: Path
) -> None:
    out = shutil.copytree(compared.path, tmp_path / "out")
    run, loaded = out / "runs" / "dp" / "seed-0", load_comparison(source_of(compared))
    damaged: dict[Path, str] = {}
    for name, key, number in (
        ("summary.json", '"test_accuracy"', "NaN"),
        ("privacy.json", '"delta"', "1e999"),
        ("scores.json", '"recall"', "NaN"),
        ("client_metrics.json", '"client_accuracy"', "-Infinity"),
    ):
        sound = (run / name).read_text()
        text = re.sub(rf"{key}: [0-9.e-]+", f"{key}: {number}", sound, count=1)
        assert f"{key}: {number}" in text
        (run / name).write_text(text)
        pending = [job.directory for job in plan_jobs(loaded, out) if job.is_pending]
        assert pending == [run], name
        (run / name).write_text(sound)
        damaged[run / name] = text
    for file, text in damaged.items():
        file.write_text(text)
    again = fedsim.compare(source_of(compared), out=out)
    assert [run.reused for run in again.results.outcomes] == [True, True, False, True]
    assert not again.failed
    assert not any(re.search("NaN|1e999|Infinity", file.read_text()) for file in damaged)
    means = (result.results.variants[1].metrics for result in (compared, again))
    assert next(means) == next(means)


@pytest.mark.parametrize("folder", ["runs", "superseded"])
@pytest.mark.parametrize("name", ["comparison_run.json", "environment.json"])
def test_a_comparison_with_a_run_of_another_schema_is_refused(
    compared: ComparisonResult, directory: Path, name: str, folder: str
) -> None:
    copy = Path(shutil.copytree(compared.path, directory / "copy"))
    (copy / "runs").rename(copy / folder)
    path = copy / folder / "dp" / "seed-0" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 9}))
    with pytest.raises(SchemaError, match=rf"dp/seed-0/{name} .*has schema 9, and fedsim"):
        fedsim.compare(directory / "compare.yaml", out=copy)


FAILING = """\
import os, signal
import numpy as np

def load(seed=0, dies=False):
    if seed == 1:
        raise ValueError("no data for this seed")
    if seed == 2 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    print("loading, which must not disturb anybody")
    generator = np.random.default_rng(seed)
    return generator.normal(size=(300, 4)), generator.integers(0, 2, 300)
"""


@pytest.mark.slow  # another process after the death
def test_a_run_that_fails_or_dies_is_reported_and_the_others_go_on(
    directory: Path, command: Command
) -> None:
    (directory / "data.py").write_text(FAILING)
    base = directory / "tiny.yaml"
    base.write_text(base.read_text().replace("digits", "./data.py:load"))
    text = (directory / "compare.yaml").read_text()
    text = text.replace("dp: {}", "dp: {data.args.dies: true}")
    (directory / "compare.yaml").write_text(text.replace("seeds: 2", "seeds: [1, 2, 0]"))
    code, out, err = command("compare", "compare.yaml", "--out", "out", "--workers", "1")
    assert code == 1
    assert "runs/dp/seed-1" in err
    assert "no data for this seed" in err
    assert "its process died (killed by SIGKILL)" in err
    assert "Traceback" not in err + out
    content = json.loads((directory / "out" / "comparison.json").read_text())
    statuses = {
        (run["variant"], run["seed"]): run["status"]
        for variant in content["variants"]
        for run in variant["runs"]
    }
    assert {run for run, status in statuses.items() if status == "failed"} == {
        ("plain", 1),
        ("dp", 1),
        ("dp", 2),
    }
    assert list(statuses.values()).count("completed") == 3
    assert any("left out seed 1 (failed), 2 (failed)" in note for note in content["notes"])
    assert "plain" in [entry["variant"] for entry in content["unfit"]]  # it has learnt nothing,
    assert content["variants"][1]["difference"] is None  # so nothing is compared with it


def started_until_the_second_run(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a comparison; return it and the rounds of its second run, of which three are done."""
    base = directory / "tiny.yaml"
    base.write_text(base.read_text().replace("rounds: 2", f"rounds: {LONG}"))
    text = (directory / "compare.yaml").read_text().replace("seeds: 2", "seeds: 1")
    short = "plain: {privacy: null, federation.rounds: 1}"
    (directory / "compare.yaml").write_text(text.replace("plain: {privacy: null}", short))
    command = [*FEDSIM, "compare", "compare.yaml", "--out", "out"]
    command += ["--workers", "1", "-q"]
    process = subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True)
    second = directory / "out" / "runs" / "dp" / "seed-0" / "rounds.jsonl"
    deadline = time.monotonic() + 90
    while not (second.is_file() and second.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    return process, second


def finish(directory: Path, second: Path) -> None:
    """Call the comparison again: the first run is reused, the second continues soundly."""
    before = second.read_text().count("\n")
    assert before < LONG
    again = fedsim.compare(directory / "compare.yaml", out=directory / "out")
    assert not again.interrupted
    assert [outcome.status for outcome in again.results.outcomes] == ["completed"] * 2
    assert [outcome.reused for outcome in again.results.outcomes] == [True, False]
    assert second.read_text().count("\n") == LONG
    assert not verify_run(RunDirectory(second.parent)).problems
    assert len((second.parent / "ledger.jsonl").read_text().splitlines()) == LONG * 3


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_an_interrupted_comparison_ends_cleanly_and_continues(directory: Path) -> None:
    process, second = started_until_the_second_run(directory)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "interrupted; run the same command again to continue" in errors
    assert "Traceback" not in errors
    assert not workers_of(directory)
    assert json.loads((second.parent / "summary.json").read_text())["status"] == "interrupted"
    finish(directory, second)


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_a_killed_comparison_leaves_no_worker_that_writes_on(directory: Path) -> None:
    process, second = started_until_the_second_run(directory)
    process.kill()
    process.communicate(timeout=30)
    # The worker ends when it has news that nobody hears. Until then it holds the directory.
    deadline = time.monotonic() + 60
    while workers_of(directory):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    finish(directory, second)


def workers_of(directory: Path) -> list[str]:
    """Worker processes whose log is in the directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "2").startswith(str(directory)):
                found.append(process.name)
        except OSError:
            continue
    return found


def test_a_directory_of_something_else_is_refused(directory: Path) -> None:
    (directory / "mine").mkdir()
    (directory / "mine" / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match="holds no comparison; choose another --out"):
        fedsim.compare(directory / "compare.yaml", out=directory / "mine")
    assert [path.name for path in (directory / "mine").iterdir()] == ["thesis.tex"]


def test_a_wrong_file_is_one_message_and_exit_code_2(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (directory / "compare.yaml").read_text()
    (directory / "compare.yaml").write_text(text.replace("dp: {}", "dp: {privcy.delta: 1}"))
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["fedsim", "compare", "compare.yaml"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == (
        "compare.yaml:7:8: variants.dp.privcy: unknown key; did you mean 'privacy'?\n"
    )
    assert not (directory / "runs").exists()


def test_two_comparisons_do_not_share_a_directory(directory: Path) -> None:
    from fedsim.comparison.jobs import lock_directory

    out = directory / "out"
    out.mkdir()
    (out / "comparison.yaml").touch()
    with (
        lock_directory(out),
        pytest.raises(RunDirectoryError, match="another fedsim compare is running"),
    ):
        fedsim.compare(directory / "compare.yaml", out=out)


@pytest.mark.usefixtures("jobs_here")
def test_a_comparison_of_which_everything_fails_says_why_and_exits_1(
    directory: Path, command: Command
) -> None:
    base = directory / "tiny.yaml"
    base.write_text(base.read_text().replace("num_clients: 3", "num_clients: 100000"))
    code, _, err = command("compare", "compare.yaml", "--out", "out", "-q")
    assert code == 1
    first, *reasons = err.splitlines()
    assert first == "no run was finished, so there is nothing to compare"
    assert len(reasons) == 4
    assert all(line.startswith("runs/") and "100000" in line.replace(",", "") for line in reasons)
