"""The command line as a person meets it: output, exit codes, and one clear line per mistake."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import fedsim
from fedsim.catalog import KEYS
from fedsim.cli import cli, main
from fedsim.cli.options import command_imports
from fedsim.core.errors import FedsimError
from fedsim.experiment import json_schema
from fedsim.report.progress import PhaseDisplay
from fedsim.runs.directory import RunDirectory
from fedsim.runs.manifest import write_manifest

GOOD = """\
name: tiny
data:
  dataset: digits
  partition: {scheme: iid, num_clients: 3}
model:
  name: logistic
federation:
  rounds: 2
local:
  steps: 1
  batch_size: full
  optimizer: {name: sgd, lr: 0.5}
privacy:
  target_epsilon: 8.0
  delta: 1e-3
  max_grad_norm: 0.5
"""


class Command:
    """Runs `fedsim` in this process in a directory of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path
    ) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.directory = directory
        monkeypatch.chdir(directory)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["fedsim", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    # A busy machine is slow, and a long phase gets a line.
    monkeypatch.setattr(PhaseDisplay.__init__, "__kwdefaults__", {"patience": 3600.0})
    command = Command(monkeypatch, capsys, tmp_path)
    command.write("good.yaml", GOOD)
    return command


def replaced(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


BROKEN = {  # each message is pinned in tests/experiment
    "empty": ("", "empty"),
    "not YAML": ("name: [1, 2\n", "bad.yaml:"),
    "unknown section": (replaced("privacy:", "privcy:"), "did you mean 'privacy'"),
    "wrong type": (replaced("rounds: 2", "rounds: two"), "bad.yaml:8:3: federation.rounds"),
    "a sum that does not fit": (
        GOOD + "secure_aggregation: {encoding: {frac_bits: 60}}\n",
        "use frac_bits 32 or less",
    ),
    "missing data file": (
        replaced("dataset: digits", "dataset: {path: no.csv, target: y}"),
        "no.csv",
    ),
}

# Wrong only when something is built or read: `validate` imports nothing and cannot see it.
BROKEN_LATER = {
    "model raises": (replaced("name: logistic", "name: ./plug.py:broken"), "no weights today"),
    "model does not fit": (replaced("name: logistic", "name: ./plug.py:narrow"), "(3, 1, 8, 8)"),
    "batch normalisation": (replaced("name: logistic", "name: ./plug.py:batch_norm"), "GroupNorm"),
    "module missing": (replaced("dataset: digits", "dataset: no.such:load"), "no.such"),
    "impossible partition": (
        replaced("num_clients: 3", "num_clients: 3, min_examples: 1000"),
        "min_examples",
    ),
    "text in a table": (
        replaced("dataset: digits", "dataset: {path: t.csv, target: y}"),
        "t.csv:3",
    ),
}

PLUGIN = """\
from torch import nn

def broken(**kwargs):
    raise OSError("no weights today")

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(10, 10))

def batch_norm():
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_clear_message_and_exit_code_2(command: Command, name: str) -> None:
    text, hint = BROKEN[name]
    command.write("bad.yaml", text)
    for verb in (("validate", "bad.yaml"), ("run", "bad.yaml", "--out", "r")):
        code, out, err = command(*verb)
        assert code == 2
        assert out == ""
        assert hint in err
        assert len(err.splitlines()) == 1, err
        assert err.startswith("bad.yaml:")
        assert "pydantic" not in err
        assert "Input should" not in err
    assert not (command.directory / "r").exists()


@pytest.mark.parametrize("name", BROKEN_LATER)
def test_what_only_running_can_find_is_one_clear_message_too(command: Command, name: str) -> None:
    text, hint = BROKEN_LATER[name]
    command.write("bad.yaml", text)
    command.write("plug.py", PLUGIN)
    command.write("t.csv", "a,y\n1.0,0\nmany,1\n")
    assert command("validate", "bad.yaml")[0] == 0
    code, out, err = command("run", "bad.yaml", "--out", "r", "--quiet")
    assert code == 2
    assert out == ""
    assert hint in err, err
    first, *pasted = err.splitlines()
    assert hint in first, err
    assert pasted == [] or pasted[0].startswith("lines to paste"), err
    assert not (command.directory / "r").exists()


def test_every_mistake_is_reported_in_one_go(command: Command) -> None:
    command.write(
        "bad.yaml",
        replaced("rounds: 2", "rounds: 0")
        .replace("lr: 0.5", "lr: -1")
        .replace("scheme: iid", "scheme: dirichlett")
        .replace("max_grad_norm", "max_grad_nrm"),
    )
    code, _, err = command("validate", "bad.yaml", "privacy.delta=3", "seed=x")
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == 6, err
    assert sum(line.startswith("command line: ") for line in lines) == 2


def test_overrides(command: Command) -> None:
    code, out, _ = command(
        "validate", "good.yaml", "--json", "federation.rounds=7", "privacy=null", "seed=3"
    )
    experiment = json.loads(out)
    assert code == 0
    assert experiment["federation"]["rounds"] == 7
    assert experiment["privacy"] is None
    assert experiment["seed"] == 3


def test_an_emptied_privacy_section_is_not_overlooked(command: Command) -> None:
    command.write("off.yaml", GOOD.split("privacy:")[0] + "privacy: null\n")
    assert command("validate", "off.yaml")[1] == "off.yaml: ok (tiny, no differential privacy)\n"
    command.write("cut.yaml", GOOD.split("  target_epsilon")[0])
    code, out, err = command("validate", "cut.yaml")
    assert (code, out) == (2, "")
    assert "privacy: no value; " in err
    assert "`privacy: null`" in err


def test_validate_says_ok(command: Command) -> None:
    assert command("validate", "good.yaml") == (
        0,
        "good.yaml: ok (tiny, DP-SGD in every client with target ε = 8 at δ = 0.001)\n",
        "",
    )


def test_validate_says_what_the_noise_follows_from(command: Command) -> None:
    groups = "{'*': {max_grad_norm: 0.4, noise_multiplier: 3}}"
    for privacy, words in (
        ("target_epsilon: 8, max_grad_norm: 1", "target ε = 8 at δ = 0.001"),
        ("noise_multiplier: 1.5, max_grad_norm: 1", "noise multiplier 1.5"),
        (f"clipping: {{name: flat, groups: {groups}}}", "the noise of each group"),
    ):
        code, out, _ = command("validate", "good.yaml", f"privacy={{delta: 1.0e-3, {privacy}}}")
        assert (code, out) == (0, f"good.yaml: ok (tiny, DP-SGD in every client with {words})\n")


def test_validate_data_says_what_a_run_would_find(command: Command) -> None:
    text = GOOD.replace("digits", "blobs").split("privacy:")[0] + "privacy: null\n"
    command.write("blobs.yaml", text)
    code, out, err = command("validate", "blobs.yaml", "--data")
    assert (code, err) == (0, "")
    assert "test examples, 2 rounds of 1 step" in out
    assert "an example has 2 values, from " in out
    assert "classes of the test set: 0: " in out
    found = json.loads(command("validate", "blobs.yaml", "--data", "--json")[1])
    assert (found["input_shape"], found["hints"], found["notes"]) == ([2], [], [])
    code, out, err = command("validate", "blobs.yaml", "model.name=cnn", "--data")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_run_prints_the_result_on_stdout_and_talks_on_stderr(command: Command) -> None:
    code, out, err = command("run", "good.yaml", "--out", "r")
    assert code == 0
    assert "Privacy spent by each client" in out
    assert "tiny: completed after 2 rounds" in out
    assert "r/report.html" in out
    assert "round 2/2" in err
    assert "accuracy" in err
    code, again, _ = command("report", "r")
    assert code == 0
    waited = re.compile(r" in [\d.]+ m?s \(rounds")  # the run's own seconds have no imports
    assert waited.sub("", again) == waited.sub("", out) != out
    code, out, _ = command("report", "r", "--json")
    assert json.loads(out)["privacy"]["system_epsilon"] <= 8.0


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("summary.json", "setup", None), ("scores.json", "majority", {"class": "x", "share": 0.1})],
)
def test_a_figure_that_no_run_writes_is_a_problem_of_the_run(
    command: Command, file: str, key: str, value: object
) -> None:
    assert command("run", "good.yaml", "--quiet", "--out", "r")[0] == 0
    path = command.directory / "r" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    write_manifest(RunDirectory(path.parent))  # a forger, or another program, wrote the rest anew
    page = (path.parent / "report.html").read_bytes()
    code, out, err = command("report", "r")
    assert (code, out) == (1, "")
    assert "r: " in err
    assert "not sound" in err
    assert (path.parent / "report.html").read_bytes() == page


@pytest.mark.parametrize(
    ("override", "is_advised"),
    [("federation.rounds=1", True), ("privacy=off", False), ("privacy.unit=client", False)],
)
def test_a_run_ends_with_the_command_that_compares_schedules_where_it_applies(
    command: Command, override: str, is_advised: bool
) -> None:
    unit = ["privacy.max_grad_norm=null", "privacy.max_update_norm=1"] * ("unit" in override)
    code, _, talk = command("run", "good.yaml", override, *unit, "--out", "advised")
    assert code == 0
    assert (f"next: fedsim plan good.yaml {override} --advise" in talk) is is_advised
    assert talk.count("--advise") == is_advised
    if is_advised:
        assert command("plan", "good.yaml", override, "--advise")[0] == 0


def test_run_json_is_for_programs(command: Command) -> None:
    code, out, err = command("run", "good.yaml", "--quiet", "--json", "--out", "r")
    assert code == 0
    assert err == ""
    summary = json.loads(out)
    assert summary["status"] == "completed"
    assert summary["path"] == "r"


def test_a_run_directory_of_its_own_by_default(command: Command) -> None:
    assert command("run", "good.yaml", "--quiet", "privacy=null")[0] == 0
    assert command("run", "good.yaml", "--quiet", "privacy=null")[0] == 0
    assert len(list((command.directory / "runs").glob("tiny-*"))) == 2


def test_a_used_run_directory_is_refused(command: Command) -> None:
    assert command("run", "good.yaml", "--quiet", "--out", "r", "privacy=null")[0] == 0
    code, _, err = command("run", "good.yaml", "--quiet", "--out", "r", "privacy=null")
    assert code == 2
    assert "never overwritten" in err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "missing.yaml"], "missing.yaml: no such file"),
        (["validate", "good.yaml", "rounds"], "key.path=value"),
        (["report", "."], "not a run directory"),
        (
            ["compare", "good.yaml", "name=" + 300 * "a", "--vary", "local.steps=1,2"],
            "at most 100 char",
        ),
        (["runn", "good.yaml"], "runn"),
        (["run"], "FILE"),
        (["run", "good.yaml", "--output", "x"], "--out"),
    ],
)
def test_wrong_commands(command: Command, arguments: list[str], hint: str) -> None:
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert hint in err


def test_a_large_delta_is_flagged(command: Command) -> None:
    code, _, err = command("run", "good.yaml", "--out", "r", "privacy.delta=0.01")
    assert code == 0
    warning = "δ is not below 1 / examples for clients 0, 1, 2"
    assert f"warning: {warning}" in err
    code, out, _ = command("plan", "good.yaml", "privacy.delta=0.01")
    assert code == 0
    assert f"warning: {warning}" in out
    planned = json.loads(command("plan", "good.yaml", "privacy.delta=0.01", "--json")[1])
    assert planned["warnings"][0].startswith(warning)


def test_a_delta_for_whole_clients_is_measured_by_their_number_and_epsilon_has_one_name(
    command: Command,
) -> None:
    unit = ("privacy.unit=client", "privacy.max_update_norm=0.5", "privacy.max_grad_norm=null")
    flag = "warning: δ is not below 1 / the number of clients"
    assert flag not in command("validate", "good.yaml", "--data", *unit, "privacy.delta=0.3")[1]
    code, out, err = command("run", "good.yaml", "--out", "r", *unit, "privacy.delta=0.35")
    assert code == 0
    assert flag in err
    assert "ε (server)" not in out
    assert "ε: against a server that sees every update" in out
    privacy = json.loads((command.directory / "r" / "privacy.json").read_text())
    assert "δ is not below 1 / the number of clients" in privacy["statement"]


def test_schema_prints_the_schema(command: Command) -> None:
    code, out, _ = command("schema")
    assert (code, json.loads(out)) == (0, json_schema())


def test_list_names_everything_with_a_line_each(command: Command) -> None:
    code, out, _ = command("list")
    assert code == 0
    kinds = json.loads(command("list", "--json")[1])
    assert list(kinds) == list(KEYS)
    for names in kinds.values():
        for name, description in names.items():
            assert f"  {name}" in out
            assert len(description) > 10
    code, out, _ = command("list", "samplings", "--json")
    assert (code, list(json.loads(out))) == (0, ["samplings"])
    code, out, err = command("list", "smaplings")
    assert (code, out, err) == (2, "", "there is no kind 'smaplings'; did you mean 'samplings'?\n")


def test_privacy_off_is_privacy_null(command: Command) -> None:
    for value in ("off", "Off", "none", "false", "null"):
        code, out, _ = command("validate", "good.yaml", f"privacy={value}", "--json")
        assert code == 0
        assert json.loads(out)["privacy"] is None
    command.write("off.yaml", GOOD[: GOOD.index("privacy:")] + "privacy: off\n")
    assert "no differential privacy" in command("validate", "off.yaml")[1]
    code, _, err = command("validate", "good.yaml", "privacy=0")
    assert code == 2
    assert "privacy: must be" in err


def test_the_seed_is_an_option(command: Command) -> None:
    assert "--seed" in command("plan", "--help")[1]
    out = command("validate", "good.yaml", "seed=1", "--seed", "3", "--json")[1]
    assert json.loads(out)["seed"] == 3
    code, _, err = command("run", "good.yaml", "--seed", "-3")
    assert code == 2
    assert "--seed" in err


def test_verbose_shows_log_messages_of_this_command_alone(command: Command) -> None:
    _, out, err = command("run", "good.yaml", "-q", "-v", "--out", "r", "--seed", "3")
    assert "checking the model: " in err
    assert "fedsim.server.app: fedavg over 3 clients" in err
    assert "fedavg over" not in out
    assert logging.getLogger("fedsim").handlers == []
    assert command("run", "good.yaml", "-q", "--out", "s", "--seed", "3")[2] == ""


def test_a_comparison_given_to_run_and_an_experiment_given_to_compare(command: Command) -> None:
    command.write("cmp.yaml", "# a comment\nbase: good.yaml\nseeds: 2\nvariants: {a: {}, b: {}}\n")
    for verb in ("run", "validate", "plan"):
        code, out, err = command(verb, "cmp.yaml")
        assert (code, out) == (2, "")
        assert err == "cmp.yaml:2:1: this is a comparison: fedsim compare cmp.yaml\n"
    code, out, err = command("compare", "good.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("good.yaml:1:1: this is an experiment, not a comparison: ")


def test_the_command_is_installed_and_knows_its_version() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from fedsim.cli import main; main()", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"fedsim, version {fedsim.__version__}\n"


OVERSPENDING = ["privacy.noise_multiplier=4", "privacy.target_epsilon=1.0"]


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_budget_that_forbids_the_plan_is_exit_code_3(command: Command, verb: str) -> None:
    command.write("exp.yaml", GOOD)
    fits = ["federation.rounds=1", "privacy.target_epsilon=1.5"]
    code, _, err = command(verb, "exp.yaml", *OVERSPENDING, *fits)
    assert code == 0, err
    code, _, err = command(verb, "exp.yaml", *OVERSPENDING, "federation.rounds=40")
    assert code == 3
    assert err.count("\n") == 1
    assert "a privacy budget forbids this plan" in err
    assert "at most " in err or "not even one round" in err
    assert not list(command.directory.glob("runs/*-2")), "nothing was started"


def test_validate_says_what_an_experiment_would_run_and_read(command: Command) -> None:
    command.write("exp.yaml", GOOD)
    assert command("validate", "exp.yaml")[1].count("\n") == 1
    command.write("net.py", "raise SystemExit('imported')")
    (command.directory.parent / "elsewhere.csv").write_text("a,y\n1,0\n")
    (command.directory / "link.csv").symlink_to(command.directory.parent / "elsewhere.csv")
    data = "data={dataset: {path: link.csv, target: y}, partition: {scheme: iid, num_clients: 2}}"
    code, out, err = command("validate", "exp.yaml", "model.name=./net.py:build", data)
    assert (code, err) == (0, "")
    assert "runs the code of: ./net.py:build" in out
    assert f"outside of the experiment's directory: {command.directory.parent}" in out


def test_the_shell_completes_commands_and_options() -> None:
    program = "from fedsim.cli import main; import sys; sys.argv = ['fedsim']; main()"
    for words, expected in (("fedsim ini", "plain,init"), ("fedsim run --s", "plain,--seed")):
        environment = {
            **os.environ,
            "_FEDSIM_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert done.stdout.split() == [expected]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"{name} none.yaml" for name in ("run", "plan", "curve", "compare", "audit", "validate")),
        "curve -q 2 -z 1 -T 1",
        *(f"{name} none" for name in ("report", "verify")),
        "predict none none.csv",
    ],
)
def test_no_command_imports_its_modules_in_silence(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises((FedsimError, click.UsageError)):  # after the imports
        cli.main(arguments.split(), standalone_mode=False)
    assert terminal.getvalue().startswith("starting ...\r\x1b[K")


def test_a_terminal_shows_that_a_command_starts_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, quiet, expected in (
        (Terminal(), False, "starting ...\r\x1b[K"),
        (Terminal(), True, ""),
        (io.StringIO(), False, ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with command_imports(quiet=quiet):
            pass
        assert stream.getvalue() == expected
