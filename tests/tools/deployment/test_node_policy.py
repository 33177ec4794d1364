"""`fedsim node-policy`: a commented file, one message for every mistake, and what it allows."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedsim.cli import cli
from fedsim.core.errors import FedsimError
from fedsim.setting_tables import rows_of
from fedsim.tools.deployment.policy import NodePolicy, load_policy, policy_of_node


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the text of the command."""
    result = CliRunner().invoke(cli, ["node-policy", *arguments])
    error = result.exception
    if isinstance(error, FedsimError):
        return error.exit_code, str(error)
    return result.exit_code, result.output


def test_the_written_file_is_for_its_user_and_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    code, text = run(str(path))
    assert (code, text) == (
        0,
        f"{path}: a new policy; edit it, then run: fedsim node-policy {path} --check\n",
    )
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    code, text = run(str(path))
    assert code == 2
    assert "exists and was left as it is; add --check" in text
    assert path.read_bytes() == before
    policy = load_policy(path)
    assert policy.require_secure_noise
    assert policy.max_epsilon == 8.0
    assert run(str(path), "--check") == (
        0,
        f"{path}: ok\n"
        "  answers private experiments only\n"
        "  at most ε = 8 at δ = 1e-06 on its data, over all experiments, seeds and runs together\n"
        "  trusts nobody: a budget counts the client's own noise alone\n"
        "  runs any plug-in of an experiment: set plugin_digests\n"
        "  reads no file of this node: name data files in files\n",
    )


def test_the_written_file_names_every_key(tmp_path: Path) -> None:
    run(str(tmp_path / "policy.yaml"))
    text = (tmp_path / "policy.yaml").read_text()
    for row in rows_of(NodePolicy):
        key = row.key.removesuffix("[]")
        assert f"\n{key}: " in text or f"\n# {key}: " in text, key


def test_every_mistake_is_one_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "max_epsilon: -1\n"
        "delt: 3\n"
        "max_rounds: 2.5\n"
        "max_rounds: 3\n"
        "helpers: [abc]\n"
        "require_privacy: no\n"
        "data_name: ../x\n"
        "plugin_digests: x\n"
    )
    code, text = run(str(path), "--check")
    assert code == 2
    assert text.splitlines() == [
        f"{path}:1:1: max_epsilon: must be > 0, got -1",
        f"{path}:2:1: delt: unknown key; did you mean 'delta'?",
        f"{path}:3:1: max_rounds: must be a whole number, got 2.5",
        f"{path}:4:1: max_rounds: duplicate key; it is already on line 3",
        f"{path}:5:11: helpers.0: must be 64 digits of 0 to 9 and a to f, got 'abc'",
        f"{path}:6:1: require_privacy: must be true or false, got 'no'",
        f"{path}:7:1: data_name: must be letters, digits, '.', '_' or '-', starting with a letter "
        "or a digit, got '../x'",
        f"{path}:8:1: plugin_digests: must be a list, got 'x'",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_epsilon: 1\n", "max_epsilon needs delta: a budget is an ε at a δ"),
        ("delta: 0.1\n", "delta needs max_epsilon: a budget is an ε at a δ"),
        (
            "{max_epsilon: 1, delta: 0.1, require_privacy: false}",
            "max_epsilon needs require_privacy: true",
        ),
        ("{max_epsilon: 1.0e-9, delta: 1.0e-300}", "affords no release at all; raise one of them"),
        ("", "the file is empty"),
        ("[]", "must be a mapping"),
    ],
)
def test_keys_that_contradict_each_other(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(content)
    code, text = run(str(path), "--check")
    assert code == 2
    assert message in text
    assert len(text.splitlines()) == 1


def test_the_check_names_what_is_not_limited(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("{max_rounds: 5, min_noise_multiplier: 0.5, plugin_digests: [], helpers: []}")
    path.chmod(0o600)
    _, text = run(str(path), "--check")
    for line in (
        "also with seeded noise, which a server can subtract",
        "without a limit on ε: set max_epsilon and delta",
        "at most 5 rounds of an experiment",
        "noise multipliers from 0.5",
        "runs plug-ins of 0 digests only",
        "sends updates to 0 helpers only, never in clear",
    ):
        assert line in text, line


def test_where_the_policy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's configuration first, then the environment, then the state."""
    monkeypatch.delenv("FEDSIM_POLICY", raising=False)
    for number, name in enumerate(("config", "variable", "policy"), start=1):
        (tmp_path / f"{name}.yaml").write_text(f"max_rounds: {number}\n")
        (tmp_path / f"{name}.yaml").chmod(0o600)
    assert policy_of_node({}, tmp_path / "nowhere") == NodePolicy()
    assert policy_of_node({}, tmp_path).max_rounds == 3
    monkeypatch.setenv("FEDSIM_POLICY", str(tmp_path / "variable.yaml"))
    assert policy_of_node({}, tmp_path).max_rounds == 2
    config = {"policy": str(tmp_path / "config.yaml")}
    assert policy_of_node(config, tmp_path).max_rounds == 1
