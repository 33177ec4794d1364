"""Files of another schema are refused by name, by every command, and nothing is changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from safetensors.numpy import load, save

import fedsim
from fedsim.cli import cli
from fedsim.core.errors import ExitCode
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import SCHEMAS, DamagedRunError, SchemaError, write_sealed
from fedsim.runs.manifest import write_manifest
from fedsim.runs.verification import verify_run
from fedsim.statement import read_facts

NOW = fedsim.__version__
EXPERIMENT: dict[str, Any] = {
    "name": "schema",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 2, "batch_size": 32},
    "privacy": {"target_epsilon": 3.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
CHECKPOINT = "checkpoint/model.safetensors"
OTHERS: list[dict[str, Any]] = [
    {"schema": 1},
    {"schema": SCHEMAS["environment.json"] + 1, "fedsim": "9.0"},
    {"schema": str(SCHEMAS["environment.json"])},
    {"schema": True},
    {"schema": [SCHEMAS["environment.json"]]},
    {"schema": 1e400},
    {"schema": None},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedsim.run(EXPERIMENT, out=tmp_path_factory.mktemp("finished") / "r").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SchemaError), result.exception
    assert result.exception.exit_code == ExitCode.WRONG_INPUT
    return str(result.exception)


def seal(run: Path) -> None:
    """Renew the digest of `environment.json` and the manifest, as a forger would."""
    inputs = json.loads((run / "checkpoint" / "inputs.json").read_text())
    del inputs["digest"]
    inputs["environment"] = RunDirectory(run)._environment_digest()
    write_sealed(run / "checkpoint" / "inputs.json", inputs)
    write_manifest(RunDirectory(run))


def test_a_run_of_this_version_is_read_and_checked_whole(run: Path) -> None:
    assert RunDirectory.open(run).read_version() == NOW
    found = verify_run(RunDirectory.open(run))
    assert (found.problems, found.unchecked) == ((), ())


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_every_command_refuses_a_run_of_another_schema(
    run: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    edit_json(run / "environment.json", lambda found: found.update(change))
    seal(run)  # a consistent forgery gains nothing
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    what = "no schema" if change["schema"] is None else f"schema {change['schema']!r}"
    for command in (
        ("report", run),
        ("verify", run),
        ("totals", run),
        ("predict", run, tmp_path / "e.yaml"),
        ("compare", run, run),
        ("run", tmp_path / "e.yaml", "--out", run, "--resume"),
    ):
        assert refusal(*command) == (
            f"{run / 'environment.json'} of fedsim {change.get('fedsim', NOW)} has {what}, and "
            f"fedsim {NOW} reads schema {SCHEMAS['environment.json']}: run again with this "
            "version, or install the version that wrote the file"
        )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["privacy.json", "scores.json", "manifest.json"])
def test_verify_names_a_file_of_another_schema(run: Path, name: str) -> None:
    edit_json(run / name, lambda found: found.update(schema=9))
    if name != "manifest.json":
        write_manifest(RunDirectory(run))
    found = verify_run(RunDirectory.open(run)).problems
    expected = f"{run / name} has schema 9, and fedsim {NOW} reads schema {SCHEMAS[name]}: "
    assert any(problem.startswith(expected) for problem in found)


@pytest.mark.parametrize(("schema", "said"), [("3", "schema 3"), (None, "no schema")])
def test_a_checkpoint_of_another_schema_is_refused(
    run: Path, schema: str | None, said: str
) -> None:
    data = (run / CHECKPOINT).read_bytes()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"] | {"schema": schema}
    kept = {name: value for name, value in metadata.items() if value is not None}
    (run / CHECKPOINT).write_bytes(save(load(data), kept))
    write_manifest(RunDirectory(run))
    expected = f"{CHECKPOINT} has {said}, and fedsim {NOW} reads schema 4: "
    with pytest.raises(SchemaError, match=expected):
        RunDirectory.open(run).read_checkpoint()
    assert any(expected in problem for problem in verify_run(RunDirectory.open(run)).problems)


@pytest.mark.parametrize("content", [None, "{", '{"schema": 7}', '{"schema": 7, "fedsim": 3}'])
def test_a_run_that_names_no_version_is_damaged(run: Path, content: str | None) -> None:
    (run / "environment.json").unlink()
    if content is not None:
        (run / "environment.json").write_text(content)
    with pytest.raises(DamagedRunError, match=r"environment\.json"):
        RunDirectory.open(run)
    with pytest.raises(DamagedRunError, match=r"environment\.json"):
        verify_run(RunDirectory(run))


def test_only_the_version_that_began_a_run_resumes_it(run: Path, tmp_path: Path) -> None:
    """Another one may draw other noise, though it reads the same files."""
    edit_json(run / "environment.json", lambda found: found.update(fedsim="0.1.9"))
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    assert refusal("run", tmp_path / "e.yaml", "--out", run, "--resume") == (
        f"{run} was written by fedsim 0.1.9; this is fedsim {NOW}: resume it with fedsim 0.1.9, or "
        "start a new run with another --out"
    )


def name_another_version(run: Path) -> None:
    edit_json(run / "environment.json", lambda found: found.update(fedsim="0.2.9"))
    edit_json(run / "privacy.json", lambda found: found.update(version="0.2.9"))


def enlarge_epsilon(found: dict[str, Any]) -> None:
    found["system_epsilon"] *= 1.2
    for row in found["clients"]:
        row["epsilon"] *= 1.2


@pytest.mark.parametrize(
    ("name", "forge", "said"),
    [
        ("privacy.json", enlarge_epsilon, "is reported as"),
        (
            "privacy.json",
            lambda found: found.update(statement="No one can learn anything."),
            "the statement does not follow from the figures beside it",
        ),
        (
            "privacy.json",
            lambda found: found["clients"][0].update(target_epsilon=1.0),
            "target_epsilon is 1.0 in privacy.json",
        ),
    ],
)
def test_a_run_that_names_another_version_is_checked_as_strictly(
    run: Path, name: str, forge: Callable[[dict[str, Any]], object], said: str
) -> None:
    name_another_version(run)
    edit_json(run / name, forge)
    seal(run)
    found = verify_run(RunDirectory.open(run))
    assert any(said in problem for problem in found.problems), found.problems
    assert found.unchecked == ()


def test_a_run_without_its_scores_is_found(run: Path) -> None:
    (run / "scores.json").unlink()
    write_manifest(RunDirectory(run))
    assert any(
        problem.startswith("scores.json belongs to runs that did not fail")
        for problem in verify_run(RunDirectory.open(run)).problems
    )


@pytest.mark.parametrize("key", ["slack", "trust", "unit", "version", "noise", "sampling"])
def test_a_privacy_file_without_a_key_is_not_sound(run: Path, key: str) -> None:
    edit_json(run / "privacy.json", lambda found: found.pop(key))
    write_manifest(RunDirectory(run))
    assert verify_run(RunDirectory.open(run)).problems


def test_an_epsilon_without_the_slack_of_its_sampler_is_not_stated(run: Path) -> None:
    content = json.loads((run / "privacy.json").read_text())
    without = read_facts({**content, "slack": None})
    assert without.objections == ("the slack of its sampler of noise is not recorded",)
    assert not without.is_bounded
