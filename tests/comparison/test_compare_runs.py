"""`fedsim compare RUN RUN`: finished runs are compared, and nothing is run."""

import io
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from fedsim.accountant.ledger.journal import Charge
from fedsim.cli import cli
from fedsim.comparison.compare import compare_runs
from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.given_runs import group_runs, read_given
from fedsim.comparison.results import ComparisonError
from fedsim.comparison.terminal import print_comparison
from fedsim.comparison.text import notes_of
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import write_sealed
from fedsim.runs.inputs import private_digest
from fedsim.runs.manifest import write_manifest


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)


@pytest.fixture
def runs(compared: ComparisonResult, tmp_path: Path) -> Path:
    """The runs of the comparison, copied into one directory: `plain-0`, `plain-1`, `dp-0`, ..."""
    for run in compared.results.outcomes:
        shutil.copytree(compared.path / run.path, tmp_path / f"{run.variant}-{run.seed}")
    return tmp_path


def of(runs: Path, *names: str) -> list[Path]:
    return [runs / name for name in names]


def change_inputs(run: Path, **digests: str) -> None:
    """Rewrite digests of a run's inputs as if other data had been there: still a sound run."""
    path = run / "checkpoint" / "inputs.json"
    content = json.loads(path.read_text())
    del content["digest"]
    write_sealed(path, {**content, **digests})
    write_manifest(RunDirectory(run))


def change_setting(run: Path, section: str, key: str, value: object) -> None:
    path = run / "experiment.yaml"
    content = yaml.safe_load(path.read_text())
    content[section][key] = value
    path.write_text(yaml.safe_dump(content))
    write_manifest(RunDirectory(run))


def test_runs_that_differ_in_the_seed_alone_are_one_variant_and_the_numbers_are_the_same(
    compared: ComparisonResult, runs: Path
) -> None:
    found = compare_runs(of(runs, "plain-0", "dp-1", "plain-1", "dp-0"), out=runs / "out")
    plain, dp = found.results.variants
    assert [plain.name, dp.name] == ["plain", "dp"]
    assert found.results.baseline == "plain"
    assert [run.seed for run in dp.outcomes] == [0, 1]
    before_plain, before_dp = compared.results.variants
    assert (plain.metrics, dp.metrics) == (before_plain.metrics, before_dp.metrics)
    assert dp.difference == before_dp.difference
    assert dp.epsilon == before_dp.epsilon
    assert found.results.pair_check.is_paired
    assert found.tuning.everything == compared.tuning.everything
    assert found.results.settings.values == {
        "plain": {"privacy": None},
        "dp": {},
    }
    assert found.results.settings.texts["dp"]["privacy"] == "given"
    for name in ("comparison.html", "comparison.json", "comparison.csv", "comparison.yaml"):
        assert (runs / "out" / name).is_file()


def test_each_record_of_a_ledger_is_read_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, from_line = list[str](), Charge.from_line
    monkeypatch.setattr(
        Charge,
        "from_line",
        lambda line, *, where: read.append(line) or from_line(line, where=where),
    )
    compare_runs(of(runs, "dp-0", "dp-1"), out=runs / "out")
    ledgers = [(runs / name / "ledger.jsonl").read_text() for name in ("dp-0", "dp-1")]
    assert read == "".join(ledgers).splitlines(keepends=True)


def test_runs_of_one_experiment_alone_are_a_mean_over_their_seeds(runs: Path) -> None:
    found = compare_runs(of(runs, "dp-0", "dp-1"), out=runs / "out")
    (only,) = found.results.variants
    assert only.metrics["test_accuracy"].n == 2
    assert only.difference is None


def test_runs_without_a_common_seed_have_no_difference_and_no_test(runs: Path) -> None:
    found = compare_runs(of(runs, "plain-0", "dp-1"), out=runs / "out", baseline="dp-1")
    assert found.results.baseline == "dp-1"
    assert all(one.difference is None for one in found.results.variants)
    assert "No seed finished both" in found.results.pair_check.statement


def test_a_directory_of_runs_and_an_earlier_comparison_stand_for_their_runs(
    compared: ComparisonResult, runs: Path
) -> None:
    first = compare_runs([compared.path], out=runs / "out")
    again = compare_runs([runs / "out"], out=runs / "out")
    parts = [compared.path / "runs" / name for name in ("plain", "dp")]
    third = compare_runs(parts, out=runs / "out")
    for found in (first, again, third):
        assert {one.name for one in found.results.variants} == {"plain", "dp"}
        assert len(found.results.outcomes) == 4


def test_a_repeated_run_is_no_new_seed_and_is_named(runs: Path) -> None:
    shutil.copytree(runs / "dp-0", runs / "dp-copy")
    found = compare_runs(of(runs, "plain-0", "dp-0", "dp-copy"), out=runs / "out")
    assert len(found.results.outcomes) == 2
    assert any(
        f"{runs / 'dp-copy'} is left out: it has the settings and the seed of" in note
        for note in notes_of(found.results)
    )


def test_other_settings_are_named_in_a_table(runs: Path) -> None:
    change_setting(runs / "plain-1", "runtime", "device", "cpu")
    found = compare_runs(of(runs, "plain-0", "plain-1"), out=runs / "out")
    assert found.results.settings.values == {
        "plain-0": {"runtime.device": "auto"},
        "plain-1": {"runtime.device": "cpu"},
    }


def test_a_setting_in_brackets_is_printed(runs: Path) -> None:
    """rich would read `[unit_norm]` as markup, and print nothing."""
    change_setting(runs / "plain-1", "model", "features", ["unit_norm"])
    found = compare_runs(of(runs, "plain-0", "plain-1"), out=runs / "out")
    console = Console(file=io.StringIO(), width=120)
    print_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    assert "[unit_norm]" in console.file.getvalue()


def test_variants_whose_names_would_be_equal_are_all_compared(runs: Path) -> None:
    """Numbers keep two `x` apart, and neither may become the name of `x-2`."""
    ((run,), _) = read_given([runs / "dp-0"])
    given = [
        replace(run, path=runs / name, settings={**run.settings, "local.steps": number * 80})
        for name, number in (("a/x", "1"), ("b/x", "2"), ("x-2", "3"))
    ]
    variants, repeated = group_runs(given)
    assert (list(variants), repeated) == (["x-1", "x-2", "x-2-3"], [])


def test_other_test_sets_and_other_data_of_one_experiment_are_refused(runs: Path) -> None:
    change_inputs(runs / "dp-0", test="0" * 64)
    with pytest.raises(ComparisonError, match="plain-0 and dp-0 have different test sets"):
        compare_runs(of(runs, "plain-0", "dp-0"), out=runs / "out")
    shutil.copytree(runs / "plain-0", runs / "plain-copy")
    change_inputs(runs / "plain-copy", data=private_digest([np.zeros(3)]))
    with pytest.raises(ComparisonError, match="same settings and seed, but other data"):
        compare_runs(of(runs, "plain-0", "plain-copy"), out=runs / "out")
    change_setting(runs / "dp-1", "data", "test_fraction", 0.3)
    with pytest.raises(ComparisonError, match=r"data.test_fraction: null and 0\.3"):
        compare_runs(of(runs, "plain-0", "dp-1"), out=runs / "out")
    assert not (runs / "out").exists()


def test_a_changed_run_is_refused_and_an_unfinished_one_left_out(runs: Path) -> None:
    privacy = runs / "dp-0" / "privacy.json"
    privacy.write_text(
        privacy.read_text().replace('"system_epsilon": 7.99', '"system_epsilon": 1.99')
    )
    with pytest.raises(ComparisonError, match=r"does not find sound[\s\S]*dp-0: privacy.json"):
        compare_runs(of(runs, "plain-0", "dp-0"), out=runs / "out")
    (runs / "dp-1" / "summary.json").unlink()
    found = compare_runs(of(runs, "plain-0", "plain-1", "dp-1"), out=runs / "out")
    assert found.results.remarks == (f"{runs / 'dp-1'} is left out: the run is unfinished.",)


def test_a_number_that_is_not_finite_is_found_before_anything_is_compared(runs: Path) -> None:
    path = runs / "dp-0" / "scores.json"
    content = json.loads(path.read_text())
    content["by_group"] = [{"group": "a", "examples": 1, "accuracy": float("nan")}]
    path.write_text(json.dumps(content))
    write_manifest(RunDirectory(runs / "dp-0"))
    with pytest.raises(ComparisonError, match=r"dp-0: scores.json has a number that is not finite"):
        compare_runs(of(runs, "plain-0", "dp-0"), out=runs / "out")


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["plain-0"], {}, "name at least two finished runs"),
        (["plain-0", "dp-7"], {}, "dp-7 does not exist"),
        (["plain-0", "."], {}, None),
        (["plain-0", "dp-0"], {"baseline": "pd-0"}, "no variant 'pd-0'; did you mean 'dp-0'"),
        (["plain-0", "dp-0"], {"metric": "test_r2"}, "have no test_r2; they have test_loss, test_"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    runs: Path, names: list[str], options: dict[str, str], message: str | None
) -> None:
    if message is None:  # a directory of runs stands for them
        assert len(compare_runs(of(runs, *names), out=runs / "out").results.outcomes) == 4
        return
    with pytest.raises((ComparisonError, RunDirectoryError)) as caught:
        compare_runs(of(runs, *names), out=runs / "out", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_output_directory_of_something_else_is_kept(
    compared: ComparisonResult, runs: Path
) -> None:
    with pytest.raises(RunDirectoryError, match="holds no comparison of runs"):
        compare_runs(of(runs, "plain-0", "dp-0"), out=compared.path)


def test_the_command_prints_the_table_and_refuses_options_of_experiments(runs: Path) -> None:
    paths = [str(path) for path in of(runs, "plain-0", "dp-0")]
    done = CliRunner().invoke(cli, ["compare", *paths, "--out", str(runs / "out")])
    assert done.exit_code == 0, done.output
    assert "Settings that differ" in done.stdout
    assert "checking 2 run directories" in done.stderr
    for option, value in (("--seeds", "3"), ("--vary", "local.steps=1,2"), ("--workers", "2")):
        refused = CliRunner().invoke(cli, ["compare", *paths, option, value])
        assert refused.exit_code == 2
        assert f"{option} does not go with run directories" in refused.stderr
    wrong = CliRunner().invoke(cli, ["compare", paths[0] + "x", paths[1] + "x"])
    assert wrong.exit_code == 2
    assert "is no run directory" in wrong.stderr


def test_any_name_of_a_directory_is_shown_as_it_is(runs: Path) -> None:
    odd = runs / r"a$\frac{x}$<b>#1"
    (runs / "plain-0").rename(odd)
    found = compare_runs([odd, runs / "dp-0"], out=runs / "out")
    page = (runs / "out" / "comparison.html").read_text()
    assert "<b>#1" not in page
    assert 'href="../a%24%5Cfrac%7Bx%7D%24%3Cb%3E%231/report.html"' in page
    svg = (runs / "out" / "figures" / "rounds.svg").read_text()
    assert r"a$\frac{x}$&lt;b&gt;#1" in svg
    assert found.results.variants[0].name == odd.name
