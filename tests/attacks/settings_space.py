"""The space of settings that a private run may have, and a covering array of it.

Each dimension has named values: keys of the experiment file to set, or to remove with None. The
first value of each is the plain one. Every pair of values of two dimensions that the file accepts
is in at least one experiment of `covering_array`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from fedsim.core.errors import FedsimError
from fedsim.experiment import load_experiment

Keys = Mapping[str, Any]
Choice = Mapping[str, str]
"""A value of each dimension, by name."""
Cell = tuple[str, str]
"""A dimension and the name of one of its values."""

BASE: dict[str, Any] = {
    "name": "neighbours",
    "seed": 1,
    "data": {"dataset": "./p.py:load", "partition": {"scheme": "./p.py:split", "min_examples": 0}},
    "model": {"name": "mlp", "args": {"hidden": [4]}},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 7, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-2, "max_grad_norm": 0.1},
}
_NO_GRADIENT: Keys = {
    "privacy.max_grad_norm": None,
    "privacy.mechanism.max_feature_norm": 1.0,
    "model": {"name": "logistic"},
    "local.optimizer.weight_decay": 0.1,
}
_VOTES: Keys = {
    "task": "pate",
    "pate": {"queries": 4, "sigma_threshold": 2.0, "sigma": 2.0},
    "privacy.unit": "client",
    "privacy.max_grad_norm": None,
    "privacy.max_update_norm": None,
}


def _faults(kind: str, **keys: Any) -> Keys:
    return {"faults": [{"kind": kind, "clients": [k], "rounds": [2 - k], **keys} for k in (0, 1)]}


SPACE: Mapping[str, Mapping[str, Keys]] = {
    "trust": {
        "local": {},
        "distributed": {"privacy.trust": "distributed", "secure_aggregation.min_clients": 3},
        "central": {"privacy.trust": "central"},
    },
    "unit": {
        "example": {},
        "client": {
            "privacy.unit": "client",
            "privacy.max_grad_norm": None,
            "privacy.max_update_norm": 0.3,
        },
    },
    "adjacency": {
        "zero_out": {},
        "add_remove": {"privacy.adjacency": {"name": "add_remove", "declared_examples": 14}},
        "replace_one": {"privacy.adjacency": "replace_one"},
    },
    "sampling": {
        "poisson": {},
        "full": {"local.batch_size": "full"},
        "rate": {"privacy.sampling": {"name": "poisson", "rate": 0.6}},
        **{
            name: {"privacy.sampling": name}
            for name in ("fixed_size", "shuffle", "balls_and_bins", "cyclic", "cyclic_poisson")
        },
    },
    "clipping": {
        "flat": {},
        **{name: {"privacy.clipping": name} for name in ("per_layer", "automatic")},
        "adaptive": {"privacy.clipping": {"name": "adaptive", "count_noise": 2.0}},
        "groups": {
            "privacy.max_grad_norm": None,
            "privacy.clipping": {
                "name": "flat",
                "groups": {"*.weight": {"max_grad_norm": 0.1}, "*.bias": {"max_grad_norm": 0.1}},
            },
        },
    },
    "weighting": {
        "uniform": {},
        "examples": {"federation.weighting": "examples"},
        "examples_over_noise": {"federation.weighting": "examples_over_noise"},
        "noise alone": {"federation.weighting": {"name": "examples_over_noise", "size_power": 0}},
    },
    "participation": {
        "all": {},
        "some": {"federation.clients_per_round": 4},
        "poisson": {
            "federation.clients_per_round": 4,
            "federation.participation": {"scheme": "poisson"},
        },
        "cyclic": {"federation.participation": {"scheme": "cyclic", "groups": 2}},
        "trace": {
            "federation.participation": {"scheme": "trace", "availability": "0-3: 1\n0-4: 2"}
        },
        "buffered": {
            "federation.participation": {
                "scheme": "buffered",
                "concurrency": 3,
                "buffer_size": 2,
                "durations": "half_normal",
            }
        },
        "turns": {
            "federation.clients_per_round": 2,
            "federation.participation": {"scheme": "min_separation"},
        },
        "partial work": {"federation.partial_work": {"share": 0.5}},
    },
    "budgets": {
        "noise": {},
        "target": {"privacy.noise_multiplier": None, "privacy.target_epsilon": 4.0},
        "own": {"privacy.clients": {"0": {"noise_multiplier": 2.0}}},
        "withdraw": {"privacy.target_epsilon": 2.5, "privacy.on_exhausted": "withdraw"},
        "stop": {"privacy.target_epsilon": 2.5, "privacy.on_exhausted": "stop"},
        "automatic delta": {"privacy.delta": "auto"},
    },
    "secure sums": {
        "none": {},
        **{
            name: {"secure_aggregation.protocol": name, "secure_aggregation.min_clients": 3}
            for name in ("additive", "quantized", "secagg")
        },
    },
    "release": {
        "gradient": {},
        "output": {
            **_NO_GRADIENT,
            "privacy.mechanism.name": "output_perturbation",
            "local.batch_size": "full",
        },
        "input": {**_NO_GRADIENT, "privacy.mechanism.name": "input_perturbation"},
        "slopes": {
            "local.gradient": {"name": "zeroth_order", "directions": 4},
            "model": {"name": "logistic"},
        },
        "votes": _VOTES,
    },
    "algorithm": {
        "fedavg": {},
        **{
            name: {"federation.strategy": name}
            for name in ("fedadam", "fedprox", "scaffold", "fednova", "fedmedian", "mr_mtl", "krum")
        },
    },
    "faults": {
        "none": {},
        "error": _faults("error"),
        "dropout_before": _faults("dropout_before"),
        "dropout_after": _faults("dropout_after"),
        "empty": _faults("empty"),
        "nan": _faults("nan"),
        "straggler": {**_faults("straggler", delay=9.0), "federation.deadline": 5.0},
    },
    "personalization": {
        "none": {},
        "fine_tune": {"personalization": {"method": "fine_tune", "steps": 2}},
        "held out": {"personalization": {"method": "label_prior", "holdout": 0.3}},
    },
    "noise": {"seeded": {}, "secure": {"privacy.noise": "secure"}},
    "correlation": {
        "none": {},
        "toeplitz": {
            "privacy.noise_correlation": {"name": "toeplitz", "bands": 2},
            "local.batch_size": 3,
        },
        "blt": {"privacy.noise_correlation": {"name": "blt", "buffers": 2}},
        "tree": {"privacy.noise_correlation": "tree"},
    },
    "model": {
        "mlp": {},
        "logistic": {"model": {"name": "logistic"}},
        "dropout": {"model": {"name": "./p.py:dropout"}},
    },
    "local": {
        "sgd": {},
        "adam": {"local.optimizer": {"name": "adam", "lr": 0.01}},
        "views": {"local.augmentations": [{"noise": 0.1}], "local.augmentation_multiplicity": 2},
        "alone": {"local.vectorized_clients": "off"},
    },
}
"""The dimensions; a later one sets its keys after an earlier one."""


NEEDS: Mapping[Cell, Choice] = {
    ("sampling", "fixed_size"): {"adjacency": "replace_one"},
    ("participation", "poisson"): {"trust": "central", "unit": "client"},
    ("correlation", "toeplitz"): {"sampling": "cyclic"},
    **{
        ("correlation", name): {"trust": "central", "unit": "client", "participation": "turns"}
        for name in ("blt", "tree")
    },
    ("release", "votes"): {"unit": "client"},
}
"""What else a choice with a value has, where nothing else is asked for."""


def experiment_of(choice: Choice) -> dict[str, Any]:
    """Return the experiment of a choice, with what its values need of other keys."""
    content = copy.deepcopy(BASE)
    for dimension, values in SPACE.items():
        for path, value in values[choice.get(dimension, next(iter(values)))].items():
            _set(content, path, copy.deepcopy(value))
    privacy, local = content["privacy"], content["local"]
    is_example = privacy.get("unit", "example") == "example"
    if privacy.get("trust", "local") != "local" and is_example:
        local["steps"] = 1
    if not is_example or isinstance(privacy.get("mechanism"), dict):
        privacy.pop("max_grad_norm", None)
    return content


def _set(content: dict[str, Any], path: str, value: Any) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        content = content.setdefault(folder, {})
    if value is None:
        content.pop(name, None)
    else:
        content[name] = value


def is_accepted(choice: Choice, base: Path) -> bool:
    """Whether the experiment file of a choice is accepted; nothing is run."""
    try:
        load_experiment(experiment_of(choice), base=base)
    except FedsimError:
        return False
    return True


def cells_of(choice: Choice) -> list[Cell]:
    """Return the value of every dimension."""
    return [(name, choice.get(name, next(iter(values)))) for name, values in SPACE.items()]


def pairs_of(choice: Choice) -> set[tuple[Cell, Cell]]:
    """Return the pairs of values in a choice."""
    return set(combinations(cells_of(choice), 2))


def covering_array(
    base: Path, *, tries: int = 8, most: int | None = None
) -> tuple[list[Choice], set[tuple[Cell, Cell]]]:
    """Return accepted choices that cover every pair that is accepted, and these pairs.

    A pair counts as refused where neither the plain values nor `tries` random ones beside it are
    accepted.

    Args:
        base: folder of the plug-ins.
        tries: random choices for each pair.
        most: end after so many choices; None: when every pair is covered.
    """
    random, covered, found = Random(5), set[tuple[Cell, Cell]](), list[Choice]()
    every = list(combinations([(n, v) for n, values in SPACE.items() for v in values], 2))
    random.shuffle(every)
    for pair in every:
        if len(found) == most:
            break
        if pair[0][0] == pair[1][0] or pair in covered:
            continue
        accepted = [c for c in _candidates(pair, random, tries) if is_accepted(c, base)]
        if accepted:
            best = max(accepted, key=lambda one: len(pairs_of(one) - covered))
            covered |= pairs_of(best)
            found.append(best)
    return found, covered


def _candidates(pair: Sequence[Cell], random: Random, tries: int) -> Iterator[Choice]:
    """Yield choices with a pair: with plain values beside it, and with more and more others."""
    wanted: dict[str, str] = {}
    for cell in pair:
        wanted |= NEEDS.get(cell, {})
    wanted |= dict(pair)
    yield wanted
    names = list(SPACE)
    for number in range(tries):
        others = random.sample(names, min(len(names), 2 + number))
        yield {**{name: random.choice(list(SPACE[name])) for name in others}, **wanted}
