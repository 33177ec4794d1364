"""A mistake is one clear line: whatever a plug-in does, a path is, or a file holds."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from pydantic import Field

from fedsim.cli import cli, main
from fedsim.cli.options import MAX_LINE_CHARS
from fedsim.core.limits import MAX_NUMBER
from fedsim.core.settings import Settings
from fedsim.data.file_names import TooManyFilesError, matching_files
from fedsim.experiment import json_schema
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.runner import run_experiment
from fedsim.simulation.engine import EngineError

EXPERIMENT: dict[str, Any] = {
    "name": "mistaken",
    "data": {"dataset": "./plug.py:load", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "./plug.py:build"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
    "privacy": {
        **{"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, "accountant": "rdp"}
    },
}
PLUGIN = """\
import os, sys
import numpy as np, torch
def load(seed=0):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)
def build():
    {statement}
    return torch.nn.Linear(3, 2)
"""
ZEROTH_ORDER = {"name": "zeroth_order"}


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, lines of stderr, text of stdout."""

    code: object
    lines: list[str]
    said: str


Command = Callable[..., Ended]


class _Stream(io.StringIO):
    """A standard output that a plug-in may close."""

    said = ""

    def close(self) -> None:
        self.said = self.getvalue()
        super().close()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in a directory with an experiment and its plug-in."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, statement: str = "pass", **changes: Any) -> Ended:
        Path("plug.py").write_text(PLUGIN.format(statement=statement))
        Path("e.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
        out, err = _Stream(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["fedsim", *arguments])
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return Ended(code, err.getvalue().splitlines(), out.said if out.closed else out.getvalue())

    return run


@pytest.fixture
def run_of(command: Command) -> Command:
    """Run `fedsim run` into r."""

    def run(*overrides: str, **changes: Any) -> Ended:
        return command("run", "e.yaml", *overrides, "--quiet", "--out", "r", **changes)

    return run


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("local.optimizer.weight_decay", "1e308", "1e+308"),
        ("local.optimizer.lr", "1e300", "1e+300"),
        ("local.gradient", "{name: zeroth_order, radius: 1e300}", "1e+300"),
        ("federation.strategy", "{name: fedadam, tau: 1e19}", "1e+19"),
    ],
)
def test_a_number_beyond_float32_is_one_line_with_its_limit(
    key: str, value: str, shown: str, run_of: Command
) -> None:
    ended = run_of(f"{key}={value}")
    assert ended.code == 2
    (line,) = ended.lines
    assert line.startswith(f"command line: {key}")
    assert line.endswith(f": must be <= 1e+18, got {shown}")
    assert not Path("r").exists()


def test_a_learning_rate_of_zeroth_order_steps_is_no_larger(run_of: Command) -> None:
    local = {**EXPERIMENT["local"], "gradient": ZEROTH_ORDER}
    ended = run_of("local.optimizer.lr=1e300", local=local)
    assert ended.code == 2
    assert ended.lines == ["command line: local.optimizer.lr: must be <= 1e+18, got 1e+300"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_largest_numbers_end_as_a_failed_run_and_not_in_an_error_of_torch(
    optimizer: str, run_of: Command
) -> None:
    """Products of two settings are still numbers in float32."""
    ended = run_of(f"local.optimizer={{name: {optimizer}, lr: 1e18, weight_decay: 1e18}}")
    assert ended.code in (0, 1)
    assert not any("Traceback" in line or "overflow" in line for line in ended.lines)


def test_every_number_of_a_file_has_a_limit_apart_from_constants_of_data() -> None:
    def unlimited(node: object, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            limits = {"maximum", "exclusiveMaximum"} & node.keys()
            if node.get("type") == "number" and not limits:
                yield path
            for key, value in node.items():
                yield from unlimited(value, f"{path}/{key}")
        elif isinstance(node, list):
            for value in node:
                yield from unlimited(value, path)

    owners = {path.split("/")[2] for path in unlimited(json_schema(), "")}
    assert owners <= {"ColumnSettings", "FeatureSettings", "StandardizeSettings"}


def test_the_limit_is_that_of_the_field_where_it_has_one() -> None:
    class Inner(Settings):
        free: float = 0.0

    class Outer(Settings):
        share: float | None = None
        inner: Inner = Inner()
        many: list[float] = Field(default=[])

    for refused in ({"share": 2e18}, {"many": [-2e18]}, {"inner": {"free": 2e18}}):
        with pytest.raises(ValueError, match="1000000000000000000"):
            Outer.model_validate(refused)
    assert Outer(share=-MAX_NUMBER).share == -MAX_NUMBER


@pytest.mark.parametrize(
    "statement",
    [
        "sys.stdout.close()",
        pytest.param("sys.stdout = None", marks=pytest.mark.slow),
        "os._exit(0)",
    ],
)
def test_a_plugin_that_ends_the_output_or_the_process_is_named(
    statement: str, run_of: Command
) -> None:
    ended = run_of(statement=statement)
    if "_exit" in statement:
        assert ended.code == 2
        (line,) = ended.lines
        assert "SystemExit: os._exit(0) (plug.py, line 7)" in line
        assert not Path("r").exists()
        return
    assert ended.code == 1
    assert ended.lines == [
        "standard output: a plug-in closed it; the files that the command wrote are whole"
    ]
    assert json.loads(Path("r/summary.json").read_text())["status"] == "completed"


def test_a_child_process_may_end_as_it_wants(run_of: Command) -> None:
    """Libraries fork, and their children end by `os._exit`."""
    real = os._exit
    ended = run_of(statement="pid = os.fork() or os._exit(3); assert os.waitpid(pid, 0)[1] == 768")
    assert ended.code == 0
    assert os._exit is real


@pytest.mark.parametrize(
    "function",
    ["lambda *a, **k: torch.zeros(())", "lambda x, *a, f=torch.linalg.vector_norm, **k: f(x)", "1"],
    ids=["scalar", "wrong", "no function"],
)
def test_a_plugin_that_replaces_a_norm_is_refused_by_name(
    function: str, run_of: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.linalg, "vector_norm", torch.linalg.vector_norm)  # restored after it
    ended = run_of(statement=f"torch.linalg.vector_norm = {function}")
    assert ended.code == 2
    (line,) = ended.lines
    assert line.startswith("a plug-in replaced torch.linalg.vector_norm, and noise and clipping")
    assert not Path("r").exists()


@pytest.mark.slow
def test_a_plugin_may_replace_what_no_noise_is_computed_with(
    run_of: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", torch.load)
    assert run_of(statement="torch.load = print").code == 0


@pytest.mark.slow
def test_a_terminal_without_greek_letters_shows_the_rest(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    Path("e.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    Path("plug.py").write_text(PLUGIN.format(statement="pass"))
    monkeypatch.setattr(sys, "argv", ["fedsim", "run", "e.yaml", "--quiet", "--out", "r"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    main()
    assert b"every client within ? = " in raw.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [("run", "e.yaml", "--out", "a\0b"), ("report", "a\0"), ("a\0b",), ("plan", "e.yaml", "a\0=1")],
)
def test_a_nul_in_an_argument_is_a_mistake_of_the_command(
    arguments: tuple[str, ...], command: Command
) -> None:
    ended = command(*arguments)
    assert ended.code == 2
    assert "has a NUL character; no path has one" in ended.lines[-1]
    assert CliRunner().invoke(cli, arguments).exit_code == 2


def test_a_nul_in_out_is_named_in_python_too(command: Command) -> None:
    command("list")  # writes the files
    with pytest.raises(RunDirectoryError, match=r"'a\\x00b' is no path"):
        run_experiment(EXPERIMENT, out="a\0b")


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "e.yaml", "x" * 100_000 + "=1"),
        ("validate", "e.yaml", "privacy." + "x" * 100_000 + "=1"),
        ("validate", "e.yaml", "x." * 50_000 + "x=1"),
        ("validate", "e.yaml", "federation.rounds=" + "x" * 100_000),
        ("x" * 100_000,),
        ("run", "--" + "x" * 100_000),
        ("report", "x" * 100_000),
        ("compare", "e.yaml", "x" * 100_000),
    ],
)
def test_a_long_mistake_is_shortened(arguments: tuple[str, ...], command: Command) -> None:
    ended = command(*arguments)
    assert ended.code in (1, 2)
    assert all(len(line) < MAX_LINE_CHARS + 10 for line in ended.lines)


def test_a_pattern_over_the_whole_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("fedsim.data.file_names.MAX_MATCHED_FILES", 1000)
    data = {"dataset": {"target": "y"}, "partition": {"scheme": "files", "pattern": "/**"}}
    ended = command("validate", "e.yaml", data=data, model={"name": "mlp"})
    assert ended.code == 2
    assert any("data.partition.pattern: '/**' leads through directories" in s for s in ended.lines)
    for pattern in ("/**/none.csv", "/*/*/*/*/*"):
        with pytest.raises(TooManyFilesError, match="name the directory of the files"):
            matching_files(pattern, tmp_path)


@pytest.mark.parametrize("pattern", ["/*/*/*.csv", "**/*.csv", "a/**", "**/b/**/*.csv", "*/?.csv"])
def test_a_pattern_matches_as_in_a_shell(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`glob.glob` is the oracle; a file is one client, however many ways lead to it."""
    from glob import glob

    for name in ("a/x.csv", "a/b/y.csv", "b/b/z.csv", ".h/x.csv", "a/.h.csv", "top.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a")
    pattern = f"{tmp_path.parent.parent}{pattern}" if pattern[0] == "/" else pattern
    found = {str(path) for path in matching_files(pattern, tmp_path).values()}
    expected = glob(os.path.join(tmp_path, pattern), recursive=True)
    assert found == {one for one in expected if os.path.isfile(one)}


def test_a_cluster_that_is_not_there_leaves_no_run(run_of: Command) -> None:
    pytest.importorskip("ray")
    ended = run_of("runtime={engine: ray, workers: 1, address: '127.0.0.1:9'}")
    assert ended.code == EngineError.exit_code == 2
    assert ended.lines[0].startswith("runtime.address: no Ray cluster at 127.0.0.1:9: ")
    assert not [path for path in Path().iterdir() if "r-" in path.name or path.name == "r"]


@pytest.mark.slow
@pytest.mark.parametrize("deep", ["a: " + "[" * 5000, "{a: " * 5000, "- " * 5000])
def test_deep_yaml_in_a_run_is_a_damaged_file(deep: str, run_of: Command, command: Command) -> None:
    assert run_of().code == 0
    Path("r/experiment.yaml").write_text(deep)
    for arguments in (("totals", "r"), ("predict", "r", "d.csv"), ("compare", "r", "r")):
        ended = command(*arguments)
        assert ended.code in (1, 2), arguments
        assert 1 <= len(ended.lines) <= 3
        assert not any("Traceback" in line for line in ended.lines)


@pytest.mark.parametrize("name", ["deep.json", "deep.yaml"])
def test_deep_ledgers_and_maps_of_clients_are_refused(name: str, command: Command) -> None:
    Path(name).write_text("[" * 1_000)
    ended = command("totals", name)
    assert ended.code == 2
    assert ended.lines == [f"{name}: neither JSON nor YAML: nested too deeply"]


@pytest.mark.slow
def test_names_of_clients_are_no_formulas_in_clients_csv(command: Command) -> None:
    """The table gets an apostrophe, every other file the name, and `verify` agrees."""
    rows = "".join(f"{i % 7},{site},{i % 2}\n" for i in range(40) for site in ("=1+1", "-2", "b"))
    Path("d.csv").write_text("a,site,y\n" + rows)
    columns = {"a": {"range": [0, 7]}}
    dataset = {"path": "d.csv", "target": "y", "columns": columns}
    data = {"dataset": dataset, "partition": {"scheme": "column", "column": "site"}}
    changes: dict[str, Any] = {"data": data, "model": {"name": "logistic"}}
    assert command("run", "e.yaml", "-q", "--out", "r", **changes).code == 0
    names = [line.split(",")[1] for line in Path("r/clients.csv").read_text().splitlines()]
    assert names == ["name", "-2", "'=1+1", "b"]
    clients = json.loads(Path("r/privacy.json").read_text())["clients"]
    assert [one["name"] for one in clients] == ["-2", "=1+1", "b"]
    assert command("verify", "r").code == 0
