"""Generator of bad command lines: numbers of every key, damaged runs, deep files, odd arguments.

A case is a function of its number, as in fuzz_cases.py, which breaks experiments and plug-ins.
"""

import copy
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import yaml

from fedsim.cli import main
from fedsim.experiment import load_experiment

NUMBERS = (
    *(-1, 0, 1, 2**31, 2**63, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e-300, 1e-18, 1e18, 1.1e18),
    *(1e30, 1e38, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "1e308"),
)
BASE: dict[str, Any] = {
    "name": "fuzz",
    "data": {
        "dataset": {"path": "d.csv", "target": "y"},
        "partition": {"scheme": "iid", "num_clients": 3},
        "test_fraction": 0.2,
    },
    "model": {"name": "mlp", "args": {"hidden": [4]}},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, "accountant": "rdp"},
}
ADAPTIVE = {**BASE["privacy"], "clipping": {"name": "adaptive", "quantile": 0.5}}
CLIENT_UNIT = {"unit": "client", "max_update_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.1}
OUTPUT = {
    **{
        "mechanism": {"name": "output_perturbation", "max_feature_norm": 1.0},
        "noise_multiplier": 1.0,
    },
    "delta": 1e-3,
}
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.1},
    {"name": "adam", "lr": 0.1, "weight_decay": 0.1},
    {"name": "adamw", "lr": 0.1, "weight_decay": 0.1},
)
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"name": "fedadam", "server_lr": 0.1, "beta_1": 0.9, "beta_2": 0.9, "tau": 1e-3},
    {"name": "fedavgm", "server_lr": 0.1, "momentum": 0.5},
    {"name": "fedprox", "proximal_weight": 0.1},
    {"name": "scaffold", "server_lr": 1.0},
    {"name": "trimmed_mean", "trimmed_share": 0.1},
)
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"name": "cosine", "eta_min": 0.01, "T_max": 2},
    {"name": "step", "gamma": 0.5, "step_size": 1},
    {"name": "exponential", "gamma": 0.5},
    {"name": "linear", "start_factor": 1.0, "end_factor": 0.1, "total_iters": 2},
)
FEATURES: tuple[Any, ...] = (
    [{"standardize": {"mean": 0.5, "std": 2.0}}],
    [{"center": 0.5}, {"log": 1.0}],
    [{"random_fourier": {"dim": 8, "gamma": 0.1}}],
)
COLUMNS: tuple[dict[str, Any], ...] = (
    {"a": {"range": [0.0, 7.0]}, "b": {"fill": 1.0, "missing": [3.0]}},
    {"a": {"classes": [0, 1, 2, 3, 4, 5, 6], "other": 1}, "b": {"log": True}},
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"privacy": None},
    {"privacy": ADAPTIVE},
    {"privacy": CLIENT_UNIT},
    {"privacy": {**BASE["privacy"], "clients": {"0": {"noise_multiplier": 2.0}}}},
    {"privacy": {**BASE["privacy"], "accountant": {"name": "rdp", "orders": [2.0, 8.0]}}},
    {"privacy": {**BASE["privacy"], "noise_multiplier": None, "target_epsilon": 8.0}},
    {"privacy": {**BASE["privacy"], "trust": "central"}, "local": {**BASE["local"], "steps": 1}},
    {
        "local": {**BASE["local"], "steps": 1},
        "privacy": {
            **BASE["privacy"],
            "trust": {"name": "distributed", "fallback_epsilon": 50.0},
        },
        "secure_aggregation": {"min_clients": 2},
    },
    {
        "privacy": {**OUTPUT},
        "model": {"name": "logistic"},
        "local": {**BASE["local"], "optimizer": OPTIMIZERS[0] | {"momentum": 0.0}},
    },
    {"secure_aggregation": {"min_clients": 2, "encoding": {"value_bound": 8.0}}},
    {"evaluation": {"holdout": 0.2}, "privacy": None},
    {
        "faults": [{"kind": "straggler", "delay": 1e-9, "probability": 0.5}],
        "federation": {"rounds": 2, "deadline": 60.0},
    },
    {"local": {**BASE["local"], "gradient": {"name": "zeroth_order", "radius": 1e-3}}},
    {"local": {**BASE["local"], "augmentation_multiplicity": 1, "epochs": 0.5, "steps": None}},
    {"personalization": {"method": "ditto", "lr": 0.1, "proximal_weight": 0.1}},
    {"personalization": {"method": "fine_tune", "lr": 0.1}},
    {"federation": {"rounds": 2, "early_stopping": {"patience": 1, "min_delta": 0.1}}},
    {"federation": {"rounds": 2, "ema_decay": 0.5, "clients_per_round": 2}},
    {"federation": {"rounds": 2, "weighting": {"name": "examples_over_noise", "size_power": 1.0}}},
    *({"local": {**BASE["local"], "optimizer": one}} for one in OPTIMIZERS),
    *({"federation": {"rounds": 2, "strategy": one}} for one in STRATEGIES),
    {"federation": {"rounds": 2, "strategy": {"name": "qfedavg", "q": 1.0}}, "privacy": None},
    *({"local": {**BASE["local"], "lr_schedule": one}} for one in SCHEDULES),
    *({"model": {**BASE["model"], "features": one}} for one in FEATURES),
    *(
        {"data": {**BASE["data"], "dataset": {**BASE["data"]["dataset"], "columns": one}}}
        for one in COLUMNS
    ),
    *(
        {"data": {**BASE["data"], "partition": {"num_clients": 3, **one}}}
        for one in (
            {"scheme": "dirichlet", "alpha": 0.5, "min_examples": 1},
            {"scheme": "quantity", "alpha": 0.5, "min_examples": 1},
            {"scheme": "shards", "classes_per_client": 1},
        )
    ),
)
DEEP = ("[" * 5000, "{a: " * 5000, "- " * 5000, "a:\n" + "  [" * 3000, '{"a":' * 5000)
WORDS = (
    *("\0", "a\0b", "", " ", "x" * 100_000, "/", ".", "..", "/dev/null", "/dev/full", "/proc/self"),
    *("~nouser/x", "~", "none.yaml", "e.yaml", "old", "é" * 300, "\udcff", "/root/none/none", "-"),
    *(
        "x/" * 3000,
        "=",
        "a=b",
        "=1",
        "x" * 100_000 + "=1",
        "privacy",
        "--",
        "-x",
        "old/ledger.jsonl",
    ),
    *("[", "*", "**", "/**", "d.csv", "deep.yaml", "deep.json", "1e308", "nan", "-1", "2**63"),
)
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run", "?", "--out", "?"),
    ("run", "e.yaml", "?"),
    ("run", "e.yaml", "--seed", "?"),
    ("run", "e.yaml", "--profile", "?", "--out", "r"),
    ("run", "e.yaml", "--out", "old", "--resume", "?"),
    ("run", "e.yaml", "--resume", "--out", "?"),
    ("plan", "?", "?"),
    ("plan", "e.yaml", "--bounds", "?"),
    ("plan", "e.yaml", "--plot", "?"),
    ("curve", "?"),
    ("curve", "-q", "?", "-z", "?", "-T", "?"),
    ("curve", "-q", "0.1", "-z", "1", "-T", "10", "--csv", "?"),
    ("validate", "?"),
    ("validate", "e.yaml", "--data", "?"),
    ("compare", "?", "?"),
    ("compare", "e.yaml", "--vary", "?"),
    ("compare", "e.yaml", "--seeds", "?", "--vary", "local.steps=1,2"),
    ("report", "?"),
    ("verify", "?"),
    ("verify", "old", "--root", "?"),
    ("predict", "?", "?"),
    ("predict", "old", "?"),
    ("predict", "old", "d.csv", "--out", "?"),
    ("totals", "?"),
    ("totals", "old", "?"),
    ("totals", "old", "--delta", "?"),
    ("totals", "old", "--clients", "?"),
    ("totals", "old", "--registry", "?"),
    ("deploy", "?", "--out", "?"),
    ("node-policy", "?"),
    ("node-policy", "--check", "?"),
    ("client-key", "?"),
    ("helper-key", "?"),
    ("audit", "?", "--steps", "20", "--clients", "1"),
    ("list", "?"),
    ("schema", "?"),
    ("init", "?"),
    ("?",),
)
OF_RUNS: tuple[tuple[str, ...], ...] = (
    ("report", "old"),
    ("verify", "old"),
    ("totals", "old"),
    ("predict", "old", "d.csv"),
    ("compare", "old", "good", "--out", "c"),
    ("run", "e.yaml", "--out", "old", "--resume", "--quiet"),
)
SMALL = ("{}", "[]", "null", "0", '"x"', "[[]]", "\ufeff{}", "", "\0", "{", "nan")
WRONG: tuple[Any, ...] = (None, [], {}, -1, 1e308, 2**63, "", "x", [[]], True)


@dataclass(frozen=True)
class Case:
    """A command line, the files that it finds, and what is damaged in a finished run.

    Attributes:
        number: the case is a function of it.
        arguments: of the command `fedsim`.
        files: text of files by name.
        damage: of `old`, a finished run: relative file name, and its new bytes or None.
    """

    number: int
    arguments: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    damage: tuple[str, bytes | None] | None = None


class Commands:
    """Cases, and the finished run that they damage.

    Args:
        place: a directory for the run.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        _write(place, {"e.yaml": yaml.safe_dump(BASE)})
        self._numeric = numeric_keys(place)
        self.finish_run()

    def finish_run(self) -> None:
        """Make the run that cases damage."""
        sys.argv = ["fedsim", "run", str(self._place / "e.yaml"), "-q", "--out", str(self.run)]
        main()

    @property
    def run(self) -> Path:
        """The finished run."""
        return self._place / "run"

    def make_case(self, number: int) -> Case:
        """Return a case: two of four have a number of a key, in the order of the keys."""
        rng = random.Random(f"fedsim command {number}")
        kind = number % 4
        if kind < 2:
            return self._number_case(number, number // 4 * 2 + kind, rng)
        return self._damage_case(number, rng) if kind == 2 else self._argument_case(number, rng)

    def write(self, case: Case, directory: Path) -> None:
        """Write what a case finds."""
        _write(directory, case.files)
        if any(word.startswith(("old", "good")) for word in case.arguments):
            copytree(self.run, directory / "old")
            copytree(self.run, directory / "good")
        if case.damage is not None:
            name, content = case.damage
            (directory / "old" / name).unlink()
            if content is not None:
                (directory / "old" / name).write_bytes(content)

    def _number_case(self, number: int, index: int, rng: random.Random) -> Case:
        variant, path = self._numeric[index * 7 % len(self._numeric)]
        experiment = _experiment(variant)
        _set(experiment, path, rng.choice(NUMBERS))
        files = {"e.yaml": yaml.safe_dump(experiment)}
        return Case(number, ("run", "e.yaml", "--quiet", "--out", "r"), files)

    def _damage_case(self, number: int, rng: random.Random) -> Case:
        names = [str(one.relative_to(self.run)) for one in sorted(self.run.rglob("*"))]
        name = rng.choice([one for one in names if (self.run / one).is_file()])
        damage = name, _damaged(name, (self.run / name).read_bytes(), rng)
        return Case(number, rng.choice(OF_RUNS), {"e.yaml": yaml.safe_dump(BASE)}, damage)

    def _argument_case(self, number: int, rng: random.Random) -> Case:
        words = [rng.choice(WORDS) if one == "?" else one for one in rng.choice(COMMANDS)]
        deep = rng.choice(DEEP)
        files = {"e.yaml": yaml.safe_dump(BASE), "deep.yaml": deep, "deep.json": deep}
        return Case(number, tuple(words), files)


def numeric_keys(base: Path) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (variant, path) of every number that a variant has, defaults and null included.

    Args:
        base: the directory of the data.
    """
    found: dict[tuple[Any, ...], int] = {}
    for index in range(len(VARIANTS)):
        whole = load_experiment(_experiment(index), base=base).experiment.model_dump(mode="json")
        found |= {(*path, _choice(whole, path)): index for path in _numbers(whole, ())}
    return [(index, path[:-1]) for path, index in found.items()]


def _choice(whole: Any, path: tuple[Any, ...]) -> str:
    """Return what chose the settings that a path leads to: names of the mappings on the way."""
    chosen = []
    for key in path[:-1]:
        whole = whole[key]
        chosen += [str(whole.get(one)) for one in ("name", "scheme") if isinstance(whole, dict)]
    return " ".join(chosen)


def _numbers(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in _numbers(inner, (*path, key))]
    if isinstance(value, list):
        return [one for place, inner in enumerate(value) for one in _numbers(inner, (*path, place))]
    is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
    return [path] if is_number else []


def _experiment(variant: int) -> dict[str, Any]:
    return copy.deepcopy({**BASE, **VARIANTS[variant]})


def _set(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        if isinstance(value, dict) and not isinstance(value.get(key), dict | list):
            value[key] = {}
        value = value[key]
    value[path[-1]] = new


def _damaged(name: str, content: bytes, rng: random.Random) -> bytes | None:
    """Return other content of a file of a run: cut, mixed, deep, or with a wrong value."""
    at = rng.randrange(len(content) + 1)
    kinds = [None, b"", content[:at], content[at:], content + b"x", content * 2, b"\xff" * 9]
    kinds += [content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]]
    kinds += [rng.choice(DEEP).encode(), rng.choice(SMALL).encode()]
    wrong = _wrong_value(name, content, rng)
    return rng.choice([*kinds, *[wrong] * 8])


def _wrong_value(name: str, content: bytes, rng: random.Random) -> bytes:
    """Return JSON or YAML with one value of a wrong type, or without it."""
    try:
        if name.endswith(".yaml"):
            return yaml.safe_dump(_changed(yaml.safe_load(content), rng)).encode()
        lines = content.splitlines() if name.endswith(".jsonl") else [content]
        lines[-1] = json.dumps(_changed(json.loads(lines[-1]), rng)).encode()
        return b"\n".join(lines) + b"\n"
    except ValueError:
        return content[::-1]


def _changed(value: Any, rng: random.Random) -> Any:
    places = list(_all_places(value))
    owner, key = rng.choice(places)
    if rng.random() < 0.3:
        del owner[key]
    else:
        owner[key] = copy.deepcopy(rng.choice(WRONG))
    return value


def _all_places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += _all_places(value[key])
    return found


def _write(directory: Path, files: dict[str, str]) -> None:
    rows = "".join(f"{i % 7},{i % 5}.5,{i % 2}\n" for i in range(90))
    for name, text in {**files, "d.csv": "a,b,y\n" + rows}.items():
        (directory / name).write_text(text, encoding="utf-8", errors="surrogatepass")
