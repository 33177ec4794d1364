"""Generator of broken experiments: files, plug-ins, data files and command lines.

A case is a function of its number. Each starts from one of a few valid experiments and is broken in
one to three places: types, sizes, text, missing and unknown keys, references, plug-ins that raise,
exit or return nonsense at some call, damaged data files.
"""

import copy
import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

PLUGIN = """\
import os, sys
import numpy as np, torch
calls = {{}}
class Mute(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
class Hostile(BaseException): pass
class Evil:
    def __len__(self): raise SystemExit(0)
    def __getattr__(self, name): raise Hostile(name)
    def __array__(self, *_, **__): raise GeneratorExit
def again(): return again()
def broken(place, value):
    calls[place] = calls.get(place, 0) + 1
    if place == {place!r} and calls[place] >= {call}:
        {statement}
    return value
def load(seed=0, **args):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    return broken("data", (x, (x[:, 0] > 0).astype(np.int64)))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
    def forward(self, x):
        return broken("forward", self.layer(x))
def build(**args):
    return broken("build", Net())
def loss(outputs, targets):
    return broken("loss", torch.nn.functional.cross_entropy(outputs, targets, reduction="none"))
broken("import", None)
"""
PLACES = ("import", "data", "build", "forward", "loss")
STATEMENTS = (
    "raise SystemExit(0)", "raise SystemExit('text')", "raise GeneratorExit", "raise Hostile",
    "raise MemoryError", "again()", "raise Mute", "raise ValueError('x' * 1_000_000)",
    "raise OSError(28, 'No space left on device')", "import click; raise click.exceptions.Exit(0)",
    "raise StopIteration", "raise KeyError('\\x1b[31m\\n\\x00')", "1 / 0", "exit()", "quit(1)",
    "raise type('N' * 100_000, (Exception,), {})", "raise ExceptionGroup('g', [ValueError()])",
    "import no_such_module_anywhere", "raise UnicodeDecodeError('utf8', b'', 0, 1, 'x')",
    "return None", "return ()", "return (value,)", "return (value, value)", "return 0", "return ''",
    "return Evil()", "return (Evil(), Evil())", "return [Evil()] * 4", "return object", "return {}",
    "return torch.tensor(float('nan'))", "return torch.zeros(0)", "return torch.ones(3)",
    "return value.sum()", "return value * float('nan')", "return value * 1e38 * 1e38",
    "return value[:1]", "return value.double()", "return value.long()", "return value.detach()",
    "return (np.zeros((0, 3)), np.zeros(0))", "return (np.zeros((5, 3)), np.zeros(4))",
    "return (np.full((9, 3), np.inf), np.zeros(9))", "return (np.array(['a'] * 9), np.zeros(9))",
    "return (np.zeros((9, 3)), np.arange(9) * 10**12)", "return (np.zeros((1, 3)), np.zeros(1))",
    "return (np.zeros((60, 3)), -np.ones(60, dtype=int))", "return torch.nn.Identity()",
    "return torch.nn.Linear(7, 2)", "return torch.nn.BatchNorm1d(3)",
    "return torch.nn.LazyLinear(2)",
    "return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())",
    "return torch.nn.Linear", "sys.stdout.close()", "sys.stdout = None", "sys.stderr.close()",
    "os._exit(0)", "os._exit(1)", "torch.linalg.vector_norm = None", "sys.stdout.detach()",
    "torch.linalg.vector_norm = lambda *a, **k: torch.zeros(())", "torch.sum = lambda *a, **k: 0",
    "torch.Tensor.add_ = lambda *a, **k: 1 / 0", "torch.Tensor.norm = None", "np.zeros = None",
    "sys.exit('x' * 100_000)", "sys.setrecursionlimit(60)", "torch.manual_seed('x')",
)  # fmt: skip
SCALARS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 10**6, 10**9, 10**18, 2**63, 10**30, 10**400, -(10**20),
    0.0, -0.0, 1e-320, 1e-300, 1e-30, 1e30, 1e308, 0.5, 1.0, 1.5, -2.5, float("nan"), float("inf"),
    "", " ", "0", "null", "auto", "full", "digits", "mlp", "cnn", "iid", "x" * 5000, "é" * 40,
    "\u202e",
    "\U0001f600", "a\nb", "a:b", "a:b:c", ":", "./", "..", "/", "/dev/null", "~", "./plug.py",
    "./plug.py:",
    "./plug.py:none", "./plug.py:Net.forward", "./plug.py:calls", "./none.py:f", "../../x.py:f",
    "os:sep",
    "sys:exit", "json:loads", "builtins:dict", "torch.nn:Linear", "no.such.module:f", "./d.csv",
    "./d.npz",
    "%s", "{}", "<<", "!!int 3", "&a", "*a", "- x",
)  # fmt: skip
COLLECTIONS: tuple[Any, ...] = (
    [], {}, [[]], [None], [1, 2], [0], [-1], [10**12], ["a"], {"": 1}, {"a": {"b": {}}},
    {"name": "sgd"},
    {"path": "d.csv", "target": "y"}, {"path": "d.npz", "target": "y"}, {"path": "none.csv",
    "target": "y"},
    {"path": "d.csv", "target": "none"}, {"0": {"target_epsilon": 1}}, {"g": {"share": 0.5,
    "delta": 1e-5}},
    [{"kind": "error"}], [{"kind": "straggler", "delay": 1}], [1] * 500, [[[[[[[[]]]]]]]],
)  # fmt: skip
KEYS = (
    "name", "seed", "data", "model", "federation", "local", "privacy", "runtime", "faults",
    "evaluation",
    "secure_aggregation", "dataset", "args", "partition", "scheme", "num_clients", "alpha",
    "min_examples",
    "test_fraction", "features", "loss", "rounds", "clients_per_round", "weighting", "strategy",
    "deadline",
    "steps", "batch_size", "max_physical_batch", "optimizer", "lr", "vectorized_clients",
    "noise_multiplier",
    "delta",
    "target_epsilon", "max_grad_norm", "clipping", "sampling", "adjacency", "accountant",
    "on_exhausted",
    "clients", "noise", "declared_examples", "rate", "engine", "device", "trackers",
    "workers", "é",
    "", " ", "a.b", "0", "x" * 300, "protocol", "min_clients", "holdout", "quantile",
    "rule",
)  # fmt: skip
TUNES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("local.optimizer.lr", (1e-30, 1e10, 1e38, 1e300)),
    ("local.optimizer", ({"name": "adam", "lr": 1e30}, {"name": "adamw", "lr": 0.1})),
    ("local.steps", (1, 7, 1000)),
    ("local.batch_size", (1, 20, 30, 1000, 10**8)),
    ("local.max_physical_batch", (1, 3, 10**8)),
    ("local.vectorized_clients", ("off", 1, 2, 10**5)),
    ("federation.rounds", (1, 5, 10**7)),
    ("federation.clients_per_round", (1, 2)),
    ("federation.weighting", ("examples",)),
    ("federation.deadline", (1e-9, 1e8)),
    ("federation.min_participants", (0, 2, 1000)),
    ("data.partition.num_clients", (1, 5, 48, 49, 10**6)),
    ("data.partition.min_examples", (0, 1, 20, 10**6)),
    ("data.partition.scheme", ("iid", "dirichlet", "shards", "quantity")),
    ("data.partition.alpha", (1e-300, 1e-3, 1e300)),
    ("data.test_fraction", (1e-300, 1e-3, 0.02, 0.5, 0.999, 1 - 1e-16)),
    ("data.features", ("tokens",)),
    ("model.loss", ("mse", "bce", "cross_entropy")),
    ("model.name", ("logistic", "mlp", "cnn")),
    ("model.args", ({"hidden": [1]}, {"hidden": [1000] * 20}, {"bias": False}, {"a": 1})),
    ("privacy.noise_multiplier", (0, 0.0, 1e-300, 1e-9, 0.01, 1e6, 1e38, 1e300)),
    ("privacy.target_epsilon", (1e-300, 1e-9, 0.1, 100, 1e6, 1e300)),
    ("privacy.max_grad_norm", (1e-300, 1e-30, 1e-9, 1e30, 1e38, 1e300)),
    ("privacy.delta", (1e-300, 1e-200, 1e-20, 0.5, 1 - 1e-16, "auto")),
    ("privacy.clipping", ("flat", "per_layer", "automatic", "adaptive")),
    ("privacy.sampling", ("poisson", "fixed_size", "shuffle", "balls_and_bins")),
    ("privacy.adjacency", ("zero_out", "replace_one")),
    (
        "privacy.adjacency",
        tuple({"name": "add_remove", "declared_examples": one} for one in (1, 30, 10**9)),
    ),
    ("privacy.accountant", ("pld", "rdp", "moments")),
    ("privacy.noise", ("secure",)),
    ("privacy.sampling", tuple({"name": "poisson", "rate": q} for q in (1e-300, 1e-9, 0.1, 1.0))),
    ("privacy.on_exhausted", ("withdraw", "stop", "refuse")),
    (
        "privacy.clipping",
        tuple(
            {"name": "adaptive", key: value}
            for key, values in {
                "quantile": (0, 0.5, 1),
                "learning_rate": (1e-300, 100, 1e300),
                "count_noise": (1e-300, 1e-3, 1e300),
            }.items()
            for value in values
        ),
    ),
    ("privacy.clients", ({"0": {"target_epsilon": 1e-9}}, {"1": {"noise_multiplier": 0}})),
    ("secure_aggregation.protocol", ("additive", "quantized", "secagg", "secagg_plus")),
    ("secure_aggregation.encoding.value_bound", (1e-300, 1e-9, 1e9, 1e300)),
    ("secure_aggregation.encoding.frac_bits", (0, 1, 32, 64)),
    ("secure_aggregation.encoding.max_weight", (1, 10**9)),
    ("secure_aggregation.aggregators", (2, 3, 16)),
    ("secure_aggregation.protocol.threshold", (1, 2, 3)),
    ("secure_aggregation.encoding.guard_bits", (0, 32)),
    ("secure_aggregation.encoding.ring_bits", (32,)),
    ("secure_aggregation.on_abort", ("skip_round",)),
    ("evaluation.holdout", (1e-300, 0.5, 0.999)),
    ("evaluation.clients", (1, 2)),
    ("evaluation.metrics", (["f1", "auc"], ["recall_per_class"], ["r2"])),
    ("runtime.device", ("cpu", "cuda")),
    ("seed", (2**63 - 1, 2**63)),
)
KINDS = ("tune", "value", "key", "plugin", "text", "data", "override")
KIND_WEIGHTS = (8, 3, 2, 8, 1, 1, 2)
COMMANDS = ("validate",) * 3 + ("plan",) * 4 + ("run",) * 12 + ("audit", "deploy", "compare")
SECTIONS: tuple[dict[str, Any], ...] = (
    {"secure_aggregation": {"min_clients": 2}},
    {"secure_aggregation": {"protocol": "secagg", "min_clients": 2}},
    {"faults": [{"kind": "dropout_after", "clients": [0]}]},
    {"evaluation": {"holdout": 0.2}},
    {},
    {},
)


@dataclass(frozen=True)
class Case:
    """One command line and the files that it finds.

    Attributes:
        number: the case is a function of it.
        files: content of each file, by name.
        arguments: of the command `fedsim`.
    """

    number: int
    files: dict[str, bytes]
    arguments: tuple[str, ...]

    def write(self, directory: Path) -> None:
        """Write the files."""
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def make_case(number: int) -> Case:
    """Return a case: a broken experiment and a command."""
    rng = random.Random(f"fedsim {number}")
    experiment = _valid(rng)
    kinds = rng.choices(KINDS, KIND_WEIGHTS, k=rng.choice((1, 1, 1, 2, 2, 3)))
    place, statement, call = "none", "pass", 1
    if "plugin" in kinds:
        place, statement = rng.choice(PLACES), rng.choice(STATEMENTS)
        call = rng.choice((1, 1, 2, 5, 10, 20, 30, 40, 50, 60, 70))
    for kind in kinds:
        if kind == "tune":
            _tune(experiment, rng)
        elif kind == "value":
            _change_value(experiment, rng)
        elif kind == "key":
            _change_key(experiment, rng)
    text = yaml.safe_dump(experiment, sort_keys=False, allow_unicode=True)
    if "text" in kinds:
        text = _change_text(text, rng)
    command = rng.choice(COMMANDS)
    files = {
        "e.yaml": text.encode("utf-8", "surrogatepass"),
        "plug.py": PLUGIN.format(place=place, statement=statement, call=call).encode(),
        "d.csv": _damage(_csv(), rng, "data" in kinds),
        "d.npz": _damage(_npz(), rng, "data" in kinds),
    }
    overrides = [_override(rng) for _ in range(rng.randint(1, 3))] if "override" in kinds else []
    if command == "compare":
        files["c.yaml"] = _comparison(rng)
        return Case(number, files, ("compare", "c.yaml", "--out", "c", "--quiet"))
    options = {
        "run": ["--quiet", "--out", "r"],
        "audit": ["--quiet", "--steps", "20", "--clients", "1"],
        "deploy": ["--out", "app"],
    }
    return Case(number, files, (command, "e.yaml", *overrides, *options.get(command, [])))


def _valid(rng: random.Random) -> dict[str, Any]:
    plugin: dict[str, Any] = {
        "data": {"dataset": "./plug.py:load"},
        "model": {"name": "./plug.py:build", "loss": "./plug.py:loss"},
    }
    table: dict[str, Any] = {
        "data": {"dataset": {"path": rng.choice(("d.csv", "d.npz")), "target": "y"}},
        "model": {"name": rng.choice(("logistic", "mlp"))},
    }
    base = copy.deepcopy(rng.choice((plugin, plugin, plugin, table)))
    base["data"]["partition"] = rng.choice(
        (
            {"scheme": "iid", "num_clients": 2},
            {"scheme": "dirichlet", "num_clients": 3, "min_examples": 4},
        )
    )
    private = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}
    budget = {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5, "accountant": "rdp"}
    base |= {
        "name": "fuzz",
        "federation": {"rounds": 2},
        "local": {"steps": 2, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": rng.choice((private, private, budget, None)),
    }
    return copy.deepcopy({**base, **rng.choice(SECTIONS)})


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (collection, key) below a value."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            found += [(value, key), *_places(value[key])]
    return found


def _nonsense(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(SCALARS if rng.random() < 0.7 else COLLECTIONS))


def _tune(experiment: dict[str, Any], rng: random.Random) -> None:
    """Set a key to a value that is allowed, or just beyond."""
    path, values = rng.choice(TUNES)
    *above, last = path.split(".")
    section = experiment
    for key in above:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    section[last] = copy.deepcopy(rng.choice(values))


def _change_value(experiment: dict[str, Any], rng: random.Random) -> None:
    collection, key = rng.choice(_places(experiment))
    collection[key] = _nonsense(rng)


def _change_key(experiment: dict[str, Any], rng: random.Random) -> None:
    sections = [experiment, *(c[k] for c, k in _places(experiment) if isinstance(c[k], dict))]
    section = rng.choice(sections)
    if section and rng.random() < 0.5:
        key = rng.choice(list(section))
        value = section.pop(key)
        if rng.random() < 0.5:
            section[key[:-1] + rng.choice("sxé_ ")] = value
    else:
        section[rng.choice(KEYS)] = _nonsense(rng)


def _change_text(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    lines = text.splitlines(keepends=True)
    line = rng.choice(lines)
    return rng.choice(
        (
            text[:at],
            text[at:],
            text[:at] + rng.choice("\t\x00\u2028:{}[]\"'&*!|>%@`#-é\ufeff\ud800") + text[at:],
            text + line,
            text.replace(line, ""),
            text.replace("  ", "\t", 1),
            text * 2,
            f"a: &a [{', '.join(['*a'] * 3)}]\n{text}",
            text.replace(": ", ":", rng.randint(1, 3)),
            "",
            "null",
            "[" * 5000,
        )
    )


def _override(rng: random.Random) -> str:
    path = ".".join(rng.choice(KEYS) for _ in range(rng.randint(1, 3)))
    value = yaml.safe_dump(_nonsense(rng), default_flow_style=True, allow_unicode=True)
    return f"{path}={value.strip().removesuffix('...').strip()}".replace("\0", "")


def _csv() -> bytes:
    rows = "".join(f"{i % 7},{i % 5}.5,{i % 2}\n" for i in range(60))
    return ("a,b,y\n" + rows).encode()


def _npz() -> bytes:
    buffer = io.BytesIO()
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(buffer, x=x, y=np.arange(60) % 2)
    return buffer.getvalue()


def _damage(content: bytes, rng: random.Random, wanted: bool) -> bytes:
    if not wanted:
        return content
    at = rng.randrange(len(content))
    noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
    return rng.choice((content[:at], content[:at] + noise + content[at:], noise, b"", content * 2))


def _comparison(rng: random.Random) -> bytes:
    content: dict[str, Any] = {
        "base": "e.yaml",
        "seeds": 1,
        "baseline": "a",
        "variants": {"a": {}, "b": {"local.steps": 1}},
    }
    for _ in range(rng.randint(1, 2)):
        rng.choice((_change_value, _change_key))(content, rng)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()
