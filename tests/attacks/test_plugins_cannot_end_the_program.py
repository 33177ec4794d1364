"""Whatever a plug-in raises, wherever: one short message with its line, and never silence."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsim.cli import main
from fedsim.core.plugin_errors import MAX_ERROR_CHARS

EXPERIMENT = """\
name: hostile
data: {{dataset: ./plug.py:load, partition: {{scheme: iid, num_clients: 2}}}}
model: {{name: ./plug.py:build, loss: ./plug.py:loss}}
federation: {{rounds: 2}}
local: {{steps: 2, batch_size: 8}}
privacy: {privacy}
runtime: {{engine: {engine}}}
"""
PRIVATE = "{noise_multiplier: 1.0, delta: 1.0e-3, max_grad_norm: 0.5}"

# `strike` raises where PLACE is named; `train` and `evaluate` are calls after the checks. A private
# run probes its mechanism before the ledger has a line, so there they come after it; another one
# begins when its directory is there.
PLUGIN = """\
import numpy as np, torch
from pathlib import Path
def is_later():
    name = "ledger.jsonl" if {private} else "environment.json"
    return any(found.stat().st_size for found in Path(__file__).parent.rglob(name))
class Hostile(BaseException): pass
class Mute(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
def again(): return again()
def strike(place):
    if place == {place!r}:
        {statement}
def load(seed=0):
    strike("data")
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def forward(self, x):
        strike("forward")
        if len(x) > 4 and is_later(): strike("train" if self.training else "evaluate")
        return self.layer(x)
def build():
    strike("build")
    return Net()
def loss(outputs, targets):
    strike("loss")
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
strike("import")
"""
STATEMENTS = {
    "SystemExit": "raise SystemExit(0)",
    "GeneratorExit": "raise GeneratorExit",
    "Hostile": "raise Hostile('out')",
    "MemoryError": "raise MemoryError",
    "RecursionError": "again()",
    "Mute": "raise Mute",
    "OSError": "raise OSError('x' * 1_000_000)",
    "Exit": "import click; raise click.exceptions.Exit(0)",
    "StopIteration": "raise StopIteration",
}
BEFORE = ["import", "data", "build", "forward", "loss"]
LATER = ["train", "evaluate"]


@dataclass(frozen=True)
class Ended:
    """How the command ended."""

    code: object
    err: str
    out: Path


Attack = Callable[..., Ended]


@pytest.fixture
def attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Attack:
    def run(
        place: str, error: str, *, private: bool = True, engine: str = "local", command: str = "run"
    ) -> Ended:
        source = PLUGIN.format(place=place, statement=STATEMENTS[error], private=private)
        (tmp_path / "plug.py").write_text(source)
        privacy = PRIVATE if private else "null"
        (tmp_path / "e.yaml").write_text(EXPERIMENT.format(privacy=privacy, engine=engine))
        out = tmp_path / "out"
        options = ["--quiet", "--out", str(out)] if command == "run" else []
        monkeypatch.setattr(sys, "argv", ["fedsim", command, str(tmp_path / "e.yaml"), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, capsys.readouterr().err, out)

    return run


@pytest.mark.parametrize(
    ("place", "error", "command"),
    [
        *((place, "SystemExit", "run") for place in BEFORE),
        *(("loss", error, "run") for error in STATEMENTS if error != "SystemExit"),
        ("forward", "SystemExit", "plan"),
    ],
)
def test_before_the_first_round_it_is_exit_2_one_line_and_nothing_written(
    place: str, error: str, command: str, attack: Attack
) -> None:
    ended = attack(place, error, command=command)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert error in line
    assert "plug.py, line " in line
    assert len(line) < MAX_ERROR_CHARS + 300
    assert not ended.out.exists()


@pytest.mark.parametrize(
    ("place", "error"), [*((place, "SystemExit") for place in LATER), ("train", "Mute")]
)
@pytest.mark.parametrize("private", [True, False], ids=["private", "plain"])
def test_later_it_is_exit_1_and_a_failed_run(
    place: str, error: str, private: bool, attack: Attack
) -> None:
    ended = attack(place, error, private=private)
    assert ended.code == 1
    assert json.loads((ended.out / "summary.json").read_text())["status"] == "failed"
    reason = json.loads((ended.out / "summary.json").read_text())["reason"]
    assert error in reason
    assert "plug.py" in reason
    assert ended.err.splitlines()[0] in (reason, f"error: {reason}")


@pytest.mark.slow
@pytest.mark.parametrize("error", [one for one in STATEMENTS if one not in ("SystemExit", "Mute")])
def test_every_other_error_in_training(error: str, attack: Attack) -> None:
    ended = attack("train", error)
    assert ended.code == 1
    assert error in ended.err
    assert "plug.py" in ended.err
    assert len(ended.err) < 2 * MAX_ERROR_CHARS + 500


@pytest.mark.slow
def test_a_worker_of_ray_survives_a_plugin_that_exits(attack: Attack, shared_ray: None) -> None:
    ended = attack("train", "SystemExit", engine="ray")
    assert ended.code == 1
    assert "SystemExit at plug.py" in ended.err


def test_an_interrupt_stays_one(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATEMENTS, "interrupt", "raise KeyboardInterrupt")
    ended = attack("loss", "interrupt")
    assert ended.code == 130
    assert "interrupted" in ended.err
