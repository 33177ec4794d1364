"""A run that was tampered with is found out."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.files import DamagedRunError
from fedsim.runs.manifest import write_manifest
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import environment_problems, verify_run
from fedsim.runs.verification.plans import plan_problems
from fedsim.statement.privacy_file import PrivacyFile

EXPERIMENT: dict[str, Any] = {
    "name": "verify",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3, "clients_per_round": 2},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(EXPERIMENT, out=tmp_path_factory.mktemp("run") / "r").path


def problems(run: Path) -> str:
    return "\n".join(verify_run(RunDirectory.open(run)).problems)


@pytest.mark.parametrize(
    "change",
    [
        {"privacy": None},
        {"privacy.accountant": {"name": "rdp", "orders": [2.0, 8.0]}},
        {"privacy.noise_multiplier": 0},
        {"privacy.adjacency": "replace_one", "privacy.sampling": "fixed_size"},
        {"privacy.adjacency": "replace_one", "privacy.sampling": "shuffle"},
        {"privacy.sampling": "balls_and_bins", "privacy.noise": "secure"},
        {"privacy.clipping": "per_layer", "privacy.accountant": "rdp"},
        {"privacy.clipping": "adaptive", "privacy.noise": "secure"},
        {"privacy.accountant": "moments", "privacy.sampling": "balls_and_bins"},
    ],
)
def test_an_honest_run_is_sound(tmp_path: Path, change: dict[str, Any]) -> None:
    result = run_experiment(EXPERIMENT, overrides=change, out=tmp_path / "r")
    assert problems(result.path) == ""
    shutil.rmtree(result.path / "checkpoint")
    found = verify_run(RunDirectory.open(result.path))
    assert found.problems == ()
    (unchecked,) = found.unchecked
    assert unchecked.startswith("checkpoint/, which was kept back")


@pytest.fixture
def shared(run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run without its checkpoint, with a manifest that a forger can renew."""
    return Path(shutil.copytree(run, tmp_path / "s", ignore=shutil.ignore_patterns("checkpoint")))


def test_a_part_of_the_checkpoint_is_missed_where_the_rest_is_there(
    run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "s"))
    (copy / "checkpoint" / "inputs.json").unlink()
    assert "checkpoint/inputs.json: listed in manifest.json and missing" in problems(copy)


def test_a_shared_run_with_fewer_rounds_or_another_ledger_is_found(shared: Path) -> None:
    rounds = (shared / "rounds.jsonl").read_text().splitlines(keepends=True)
    (shared / "rounds.jsonl").write_text("".join(rounds[:-1]))
    write_manifest(RunDirectory(shared))  # a forger who renews the manifest without the checkpoint
    assert "summary.json has 3 rounds, rounds.jsonl 2" in problems(shared)
    (shared / "rounds.jsonl").write_text("".join(rounds))
    records = (shared / "ledger.jsonl").read_text().splitlines(keepends=True)
    (shared / "ledger.jsonl").write_text("".join(records[:-1]))
    write_manifest(RunDirectory(shared))
    assert "ledger.jsonl lacks the charge of client 1 in round 3" in problems(shared)


@pytest.mark.parametrize("aborted", ["too few answers", "", False])
def test_a_round_without_clients_is_found_where_no_sum_is_secure(
    shared: Path, aborted: object
) -> None:
    rounds = [json.loads(line) for line in (shared / "rounds.jsonl").read_text().splitlines()]
    rounds[1] |= {"participants": [], "aborted": aborted}
    (shared / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds))
    write_manifest(RunDirectory(shared))
    assert "round 2: rounds.jsonl accounts for the clients []" in problems(shared)


def test_every_client_is_recomputed(run: Path) -> None:
    recorded = json.loads((run / "privacy.json").read_text())["clients"]
    assert [client["client"] for client in recorded] == [0, 1, 2]
    found = verify_run(RunDirectory.open(run)).epsilons
    assert found == pytest.approx([client["epsilon"] for client in recorded], rel=1e-9)


def test_flipping_a_bit_of_any_byte_of_the_ledger_is_found(run: Path) -> None:
    """Every byte of the last two records; one of those before is as the first of them."""
    original = (run / "ledger.jsonl").read_bytes()
    last = len(b"".join(original.splitlines(keepends=True)[-2:]))
    generator = random.Random(3)
    try:
        for position in range(len(original) - last, len(original)):
            changed = bytearray(original)
            changed[position] ^= 1 << generator.randrange(8)
            (run / "ledger.jsonl").write_bytes(bytes(changed))
            found = problems(run)
            assert "ledger.jsonl, " in found, f"byte {position}: {found}"
    finally:
        (run / "ledger.jsonl").write_bytes(original)


def edit(run: Path, name: str, change: Any) -> str:
    original = (run / name).read_text()
    try:
        (run / name).write_text(change(original))
        return problems(run)
    finally:
        (run / name).write_text(original)


def test_a_ledger_without_its_last_record_is_found(run: Path) -> None:
    shorter = edit(run, "ledger.jsonl", lambda text: "".join(text.splitlines(True)[:-1]))
    assert "is not the one that privacy.json names" in shorter


def test_a_smaller_epsilon_is_found(run: Path) -> None:
    def understate(text: str) -> str:
        content = json.loads(text)
        content["clients"][1]["epsilon"] *= 1 - 1e-7
        return json.dumps(content)

    found = edit(run, "privacy.json", understate)
    assert "client 1: ε by pld is reported as" in found
    assert "clients.csv and privacy.json disagree" in found


def test_a_ledger_with_more_noise_in_the_report_is_found(run: Path) -> None:
    def soften(text: str) -> str:
        return re.sub(r'"noise_multiplier": [0-9.]+', '"noise_multiplier": 2.0', text)

    assert "disagree on what was spent" in edit(run, "privacy.json", soften)


def test_an_average_instead_of_the_largest_is_found(run: Path) -> None:
    def average(text: str) -> str:
        content = json.loads(text)
        content["system_epsilon"] *= 1 - 1e-7
        return json.dumps(content)

    assert "system_epsilon is not the largest" in edit(run, "privacy.json", average)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("no protection against anyone who knows the seed", "", "the statement does not follow"),
        ('"kind": "limit"', '"kind": "limit"', ""),
        ('"noise": "seeded"', '"noise": "secure"', "the statement does not follow"),
        ('"sampling": "poisson"', '"sampling": "shuffle"', "the statement does not follow"),
        ('"sampling": "poisson"', '"orders": [2.0], "sampling": "poisson"', "has orders that no"),
        ('"ledger_digest": "', '"ledger_digest": "0', "ledger_digest is not that of"),
    ],
)
def test_words_that_do_not_follow_from_the_figures_are_found(
    run: Path, old: str, new: str, said: str
) -> None:
    found = edit(run, "privacy.json", lambda text: text.replace(old, new, 1))
    assert said in found
    assert bool(found) == bool(said)


def test_the_command(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.cli import main

    monkeypatch.setattr("sys.argv", ["fedsim", "verify", str(run)])
    main()
    assert "sound (3 clients recomputed, largest ε = " in capsys.readouterr().out
    original = (run / "ledger.jsonl").read_text()
    (run / "ledger.jsonl").write_text(original.replace('"count":2', '"count":1', 1))
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        (run / "ledger.jsonl").write_text(original)
    assert end.value.code == 1
    assert "the record was changed" in capsys.readouterr().err


COMPUTED = {
    *("schema", "version", "private", "system_epsilon", "slack", "ledger_digest"),
    *("secure_aggregation", "statement", "statement_points", "certificates", "profile", "attack"),
    "clients",
}
TERMS = [name for name in PrivacyFile.__annotations__ if name not in COMPUTED]
CLIENT_TERMS = (
    *("against", "examples", "delta", "target_epsilon", "sampling_rate", "max_grad_norm", "group"),
    *("clip_norm", "group_clip_norms", "max_update_norm"),
)
COMPUTED_OF_CLIENTS = {
    *("client", "epsilon", "epsilon_rdp", "noise_multiplier", "rounds", "steps"),
    *("withdrawn_round", "ledger", "ledger_head"),
}


def test_every_key_is_a_term_of_the_settings_or_computed(run: Path) -> None:
    content = json.loads((run / "privacy.json").read_text())
    assert set(content) <= {*TERMS, *COMPUTED}
    assert set(content["clients"][0]) <= {*CLIENT_TERMS, *COMPUTED_OF_CLIENTS}
    assert not {*CLIENT_TERMS} & COMPUTED_OF_CLIENTS


@pytest.mark.parametrize("name", TERMS)
def test_a_term_that_the_settings_do_not_say_is_found(run: Path, name: str) -> None:
    files = RunFiles(RunDirectory.open(run))
    vars(files)["privacy"] = {**files.privacy, name: "another"}
    (found,) = environment_problems(files)
    assert found.startswith(f"{name} is another in privacy.json and ")


@pytest.mark.parametrize("clients", [None, 1, ["a"], {"0": 1}, [{"client": 0}], [{"client": []}]])
def test_charges_of_a_run_without_whole_records_are_refused(run: Path, clients: object) -> None:
    files = RunFiles(RunDirectory.open(run))
    vars(files)["optional"] = lambda name: {"clients": clients}
    with pytest.raises(DamagedRunError, match=r"privacy\.json: the file is damaged"):
        _ = files.histories


@pytest.mark.parametrize("name", CLIENT_TERMS)
def test_a_term_of_a_client_that_the_settings_do_not_say_is_found(run: Path, name: str) -> None:
    files = RunFiles(RunDirectory.open(run))
    # The number of examples is recorded alone, and the plan that it gives has another rate.
    another, said = (7, "sampling_rate is ") if name == "examples" else (0.125, f"{name} is 0.125 ")
    files.clients[1][name] = another
    assert f"client 1: {said}" in "".join(plan_problems(files))
