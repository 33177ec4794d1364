"""No file of an ended run changes unseen; a forger of all of them is left to a root kept elsewhere.

The first half changes files under the manifest that the run wrote. The second half is a forger who
also computes chains, digests, figures, words and the manifest anew: each forgery leaves one
contradiction between the files, and that one is found.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import fedsim
from fedsim.cli import cli
from fedsim.core.errors import ExitCode
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import DamagedRunError
from fedsim.runs.manifest import FILE, ManifestError, changed_files, read_manifest, write_manifest
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.tracking.callbacks import RunCallback

if TYPE_CHECKING:
    from forger import Forger, refusal
else:  # beside this file; the tests are no package
    _SPEC = spec_from_file_location("forger", Path(__file__).with_name("forger.py"))
    _MODULE = module_from_spec(_SPEC)
    _SPEC.loader.exec_module(_MODULE)
    Forger = _MODULE.Forger
    refusal = _MODULE.refusal

EXPERIMENT: dict[str, Any] = {
    "name": "whole",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 4, "clients_per_round": 2},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {"target_epsilon": 3.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
FILES = (
    "checkpoint/inputs.json",
    "checkpoint/model.safetensors",
    "clients.csv",
    "environment.json",
    "experiment.yaml",
    "ledger.jsonl",
    "manifest.json",
    "model.safetensors",
    "privacy.json",
    "releases.jsonl",
    "report.html",
    "rounds.jsonl",
    "scores.json",
    "summary.json",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedsim.run(EXPERIMENT, out=tmp_path_factory.mktemp("finished") / "r").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


def fedsim_command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_every_file_of_a_run_is_listed(finished: Path) -> None:
    found = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    manifest = read_manifest(RunDirectory(finished))
    assert found == set(FILES) == {*manifest.records, *manifest.pages, FILE}
    assert set(manifest.pages) == {"report.html"}
    assert refusal(finished) == ""
    assert refusal(finished, root=manifest.root.upper()) == ""


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_a_cut_and_a_removal_of_any_file_are_found(run: Path, name: str) -> None:
    path = run / name
    content, positions = path.read_bytes(), random.Random(name)
    for _ in range(2):
        changed = bytearray(content)
        changed[positions.randrange(len(content))] ^= 1 << positions.randrange(8)
        path.write_bytes(bytes(changed))
        assert name.rpartition("/")[2] in refusal(run)
    for wrong in (content[: len(content) // 2], b"", content + b"\n"):
        path.write_bytes(wrong)
        assert name.rpartition("/")[2] in refusal(run)
    path.unlink()
    assert f"{name}: listed in {FILE} and missing" in refusal(run) or "is missing" in refusal(run)
    (run.parent / "copy").write_bytes(content)
    path.symlink_to(run.parent / "copy")  # the same bytes, which may change at any time
    assert name == FILE or f"{name}: changed" in refusal(run)


def test_a_changed_byte_anywhere_in_the_manifest_is_found(run: Path) -> None:
    path, bits = run / FILE, random.Random(4)
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << bits.randrange(8)
        path.write_bytes(bytes(changed))
        try:
            manifest = read_manifest(RunDirectory(run))
        except ManifestError:
            continue
        assert list(changed_files(RunDirectory(run), manifest)), position  # a page of that name
    spaced = json.dumps(json.loads(content))  # the same content, written otherwise
    path.write_text(spaced)
    assert "not the text that fedsim wrote" in refusal(run)


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint/old.safetensors", "a/b/c", ".hidden"])
def test_an_unlisted_file_is_found(run: Path, name: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("x")
    assert refusal(run) == f"{name}: not listed in {FILE}"


def test_a_link_to_a_folder_is_found(run: Path) -> None:
    (run / "more").symlink_to(run.parent)
    assert refusal(run) == f"more: not listed in {FILE}"


def test_the_lock_and_folders_of_trackers_are_not_covered_and_verify_says_so(run: Path) -> None:
    (run / "checkpoint" / "lock").write_text("{}")
    (run / "mlflow").mkdir()
    (run / "mlflow" / "run_id.txt").write_text("1")
    result = fedsim_command("verify", run)
    assert result.exit_code == 0
    assert f"not checked: mlflow/, the files of a tracker, which {FILE} does not" in result.stderr


def test_a_killed_run_is_unfinished(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / FILE).unlink()
    for command in ("verify", "report"):
        result = fedsim_command(command, run)
        assert result.exit_code == ExitCode.FAILED
        assert "unfinished: it has no summary.json" in result.stderr
        assert f"fedsim run FILE --out {run} --resume" in result.stderr


def test_an_ended_run_without_its_manifest_is_refused(run: Path) -> None:
    (run / FILE).unlink()
    result = fedsim_command("verify", run)
    assert result.exit_code == ExitCode.FAILED
    assert f"{FILE} is missing" in result.stderr


def test_every_orderly_end_has_a_manifest_and_a_resume_removes_it_first(
    tmp_path: Path, stop_after: Callable[[int], RunCallback]
) -> None:
    out = tmp_path / "r"
    assert run_experiment(EXPERIMENT, out=out, callback=stop_after(2)).status == "interrupted"
    assert refusal(out) == ""

    class Look:
        def started(self, federation: Any, path: Path) -> None:
            assert not (path / FILE).exists()

        def round_finished(self, row: Any) -> None: ...

        def ended(self) -> None: ...

    assert run_experiment(EXPERIMENT, out=out, resume=True, callback=Look()).status == "completed"
    assert refusal(out) == ""
    lost = {**EXPERIMENT, "faults": [{"kind": "dropout_after", "rounds": [2]}]}
    with pytest.raises(RunFailedError):
        run_experiment(lost, out=tmp_path / "failed")
    assert refusal(tmp_path / "failed") == ""
    budgets = {
        "privacy.noise_multiplier": 1.5,
        "privacy.on_exhausted": "stop",
        "privacy.target_epsilon": 0.3,
    }
    stopped = run_experiment(EXPERIMENT, overrides=budgets, out=tmp_path / "stopped")
    assert stopped.status == "stopped"
    assert refusal(stopped.path) == ""


def test_a_run_that_ended_in_order_resumes_from_the_files_with_which_it_ended(
    tmp_path: Path, stop_after: Callable[[int], RunCallback]
) -> None:
    """A forger's checkpoint, whole and with its digests, is another model."""
    out = tmp_path / "r"
    run_experiment(EXPERIMENT, out=out, callback=stop_after(2))
    directory = RunDirectory(out)
    file = out / "checkpoint/model.safetensors"
    found, content = directory.read_checkpoint(), file.read_bytes()
    assert found is not None
    arrays = {name: value + 1 for name, value in to_numpy(found.state.arrays).items()}
    state = replace(found.state, arrays=to_arrays(arrays))
    directory.write_checkpoint(replace(found, state=state))
    with pytest.raises(DamagedRunError, match="changed after manifest"):
        run_experiment(EXPERIMENT, out=out, resume=True)
    file.write_bytes(content)
    assert run_experiment(EXPERIMENT, out=out, resume=True).status == "completed"


def test_a_page_is_written_for_a_sound_run_only_and_does_not_change_the_root(run: Path) -> None:
    before = read_manifest(RunDirectory(run))
    (run / "report.html").write_text("ε = 0")
    assert "report.html: changed" in refusal(run)
    assert fedsim_command("report", run).exit_code == 0
    assert refusal(run) == ""
    assert read_manifest(RunDirectory(run)) == before
    (run / "summary.json").write_text((run / "summary.json").read_text() + " ")
    (run / "report.html").write_text("ε = 0")
    result = fedsim_command("report", run)
    assert result.exit_code == ExitCode.FAILED
    assert "summary.json: changed" in result.stderr
    assert "not sound, so report.html was not written" in result.stderr
    assert (run / "report.html").read_text() == "ε = 0"


def drop_half_of_the_records(forger: Forger) -> None:
    forger.charges = forger.charges[::2]


def drop_half_of_the_records_and_their_participations(forger: Forger) -> None:
    drop_half_of_the_records(forger)
    kept = {(one["client"], one["round"]) for one in forger.charges}
    for row in forger.rounds:
        row["participants"] = [k for k in row["participants"] if (k, row["round"]) in kept]


def claim_four_times_the_noise(forger: Forger) -> None:
    for row in forger.privacy["clients"]:
        noise = row["noise_multiplier"]
        forger.charges = json.loads(
            json.dumps(forger.charges).replace(repr(noise), repr(4 * noise))
        )
        row["noise_multiplier"] = 4 * noise


def remove_a_client(forger: Forger) -> None:
    forger.charges = [one for one in forger.charges if one["client"] != 2]
    del forger.privacy["clients"][2]
    for row in forger.rounds:
        row["participants"] = [client for client in row["participants"] if client != 2]


def halve_the_sampling_rate(forger: Forger) -> None:
    for row in forger.privacy["clients"]:
        rate = row["sampling_rate"]
        text = json.dumps(forger.charges)
        forger.charges = json.loads(text.replace(repr(rate), repr(rate / 2)))
        row["sampling_rate"] = rate / 2


def halve_the_steps(forger: Forger) -> None:
    forger.replace_in_ledger('"count": 2', '"count": 1')
    forger.replace_in_ledger('"steps": 2', '"steps": 1')


def raise_delta(forger: Forger) -> None:
    for row in forger.privacy["clients"]:
        row["delta"] = 0.01


def charge_another_round(forger: Forger) -> None:
    schedule = {row["round"]: set(row["participants"]) for row in forger.rounds}
    one, number = next(
        (one, number)
        for one in forger.charges
        for number, clients in schedule.items()
        if one["client"] not in clients
    )
    one["round"] = number


Forgery = Callable[[Forger], object]


def edit(name: str, old: str, new: str) -> Forgery:
    return lambda forger: forger.edit(name, old, new)


def set_in_summary(**changes: Any) -> Forgery:
    return lambda forger: forger.summary.update(changes)


def set_in_last_round(**changes: Any) -> Forgery:
    return lambda forger: forger.rounds[-1].update(changes)


def set_in_rows(**changes: Any) -> Forgery:
    return lambda forger: [row.update(changes) for row in forger.privacy["clients"]]


FORGERIES: dict[str, tuple[Forgery, str]] = {
    "half of the records": (drop_half_of_the_records, "ledger.jsonl lacks the charge of client"),
    "half of the records and participations": (
        drop_half_of_the_records_and_their_participations,
        "the schedule of experiment.yaml asks",
    ),
    "four times the noise": (claim_four_times_the_noise, "noise_multiplier is"),
    "a client removed": (remove_a_client, "experiment.yaml has 3 clients"),
    "half the sampling rate": (halve_the_sampling_rate, "sampling_rate is"),
    "half the steps": (halve_the_steps, "steps, and experiment.yaml plans 2"),
    "a larger δ": (raise_delta, "delta is 0.01 in privacy.json and 0.001 by experiment.yaml"),
    "a charge of another round": (charge_another_round, "ledger.jsonl lacks the charge"),
    "a smaller target": (
        edit("experiment.yaml", "target_epsilon: 3.0", "target_epsilon: 1.0"),
        "target_epsilon is 3.0 in privacy.json and 1.0 by experiment.yaml",
    ),
    "secure noise in the experiment": (
        edit("experiment.yaml", "noise: seeded", "noise: secure"),
        "noise is seeded in privacy.json and secure in experiment.yaml",
    ),
    "secure noise in the statement": (
        lambda forger: forger.privacy.update(noise="secure"),
        "noise is secure in privacy.json and seeded in experiment.yaml",
    ),
    "a larger bound C": (set_in_rows(max_grad_norm=0.1), "max_grad_norm is 0.1 in privacy.json"),
    "another size": (set_in_rows(examples=5000), "sampling_rate is"),
    "another target in a row": (set_in_rows(target_epsilon=1.0), "target_epsilon is 1.0"),
    "another group": (set_in_rows(group="careful"), "group is careful"),
    "a withdrawal": (set_in_rows(withdrawn_round=2), "left in round None"),
    "an adapted bound": (set_in_rows(clip_norm=0.1), "clip_norm"),
    "another seed": (edit("experiment.yaml", "seed: 0", "seed: 5"), "experiment.yaml 5"),
    "more rounds": (edit("experiment.yaml", "rounds: 4", "rounds: 9"), "has 4 of 9 rounds"),
    "another name": (set_in_summary(name="other"), "summary.json names 'other'"),
    "a better accuracy": (set_in_summary(test_accuracy=0.99), "the metrics of summary.json"),
    "a better accuracy in the rounds": (
        set_in_last_round(test_accuracy=0.99),
        "the metrics of summary.json",
    ),
    "an early end": (set_in_summary(status="stopped"), "has the reason None"),
    "fewer rounds": (set_in_summary(rounds=3), "of 4 rounds"),
    "a shorter time": (set_in_summary(seconds=0.0), "the seconds of summary.json"),
    "a smaller ε on the way": (set_in_last_round(epsilon_max=0.1), "cannot be 0.1"),
    "a step less in the rounds": (
        lambda forger: forger.rounds[0].update(
            shortened=[{"client": forger.rounds[0]["participants"][0], "steps": 1}]
        ),
        "1 steps in round 1 by rounds.jsonl",
    ),
    "another unit": (lambda forger: forger.privacy.update(unit="client"), "unit is client"),
    "another version": (
        edit("environment.json", f'"fedsim": "{fedsim.__version__}"', '"fedsim": "0.2.1"'),
        "environment.json",
    ),
    "another seed in the environment": (
        edit("environment.json", '"seed": 0', '"seed": 1'),
        "environment.json: the file was changed",
    ),
}


def test_a_forger_who_changes_nothing_is_not_found(run: Path) -> None:
    """What the forger computes anew is what the run wrote: nothing below is found by accident."""
    assert Forger(run).write() == ""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_with_new_chains_and_a_new_manifest_is_found(run: Path, name: str) -> None:
    forge, said = FORGERIES[name]
    forger = Forger(run)
    forge(forger)
    assert said in forger.write()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "model.safetensors is not the model of the checkpoint"),
        ("clients.csv", "clients.csv and privacy.json disagree"),
    ],
)
def test_a_table_or_model_that_is_not_of_the_run_is_found(run: Path, name: str, said: str) -> None:
    content = bytearray((run / name).read_bytes())
    content[-3] ^= 1
    (run / name).write_bytes(bytes(content))
    write_manifest(RunDirectory(run))
    assert said in refusal(run)


def test_a_summary_with_a_smaller_delta_is_found(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "delta": 1e-5}, indent=2) + "\n")
    write_manifest(RunDirectory(run))
    assert "summary.json does not name the largest δ" in refusal(run)


def test_words_that_do_not_follow_from_the_figures_are_found_in_every_key(run: Path) -> None:
    whole = json.loads((run / "privacy.json").read_text())
    for key in (
        "statement",
        "statement_points",
        "profile",
        "private",
        "ledger_digest",
        "certificates",
    ):
        other = json.dumps(whole[key]).translate(str.maketrans("12345678", "21436587"))
        value = json.loads(other.replace("true", "false"))
        assert value != whole[key], key
        (run / "privacy.json").write_text(json.dumps({**whole, key: value}, indent=2) + "\n")
        write_manifest(RunDirectory(run))
        assert refusal(run), key


def test_a_run_that_passes_for_one_of_another_schema_is_refused(run: Path) -> None:
    """No number that it may claim spares it a check; tests/runs/test_schema.py has the rest."""
    forger = Forger(run)
    forger.edit("environment.json", '"schema": 7', '"schema": 3')
    assert "environment.json of fedsim" in refusal(run)
    (run / FILE).unlink()
    assert "has schema 3, and fedsim" in refusal(run)


def test_only_a_root_kept_elsewhere_finds_a_consistent_forgery(run: Path) -> None:
    """Another run of the same experiment in its place: each file agrees with each other."""
    root = read_manifest(RunDirectory(run)).root
    forger = Forger(run)
    forger.rounds[0]["timeline"]["train"] = 0.0
    assert forger.write() == ""
    assert "not the given" in refusal(run, root=root)
    result = fedsim_command("verify", run, "--root", root)
    assert result.exit_code == ExitCode.FAILED
    assert root in result.stderr
    assert fedsim_command("verify", run, "--root", "0").exit_code == ExitCode.WRONG_INPUT


NO_RUN_WRITES = (
    *("", "null", "[]", "{}", "3", '"text"', '{"clients": 3}', "[" * 500, "\x00" * 10),
    '{"clients": [{}], "accountant": "pld", "adjacency": "zero_out"}',
    '{"schema": 1e400}',
)


@pytest.mark.parametrize("name", [name for name in FILES if name != "report.html"])
def test_content_that_no_run_writes_is_a_line_and_no_traceback(run: Path, name: str) -> None:
    for content in NO_RUN_WRITES:
        (run / name).write_text(content)
        if name != FILE:
            write_manifest(RunDirectory(run))
        assert refusal(run), content
