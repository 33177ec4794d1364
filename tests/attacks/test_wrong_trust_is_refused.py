"""Every combination without a theorem is refused at validation, by its key and with its fix.

Each case is one change to a sound experiment of a cell. All messages must be at the key of the
change, with its place in the file, and one of them must name the fix.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.experiment import load_experiment
from fedsim.experiment.errors import ExperimentError

LOCAL: dict[str, Any] = {
    "name": "cell",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 10}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 3},
    "local": {"steps": 1, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
SECURE = {"min_clients": 8, "aggregators": 2}
DISTRIBUTED = {
    **LOCAL,
    "privacy": {**LOCAL["privacy"], "trust": {"name": "distributed"}},
    "secure_aggregation": SECURE,
}
CENTRAL = {**LOCAL, "privacy": {**LOCAL["privacy"], "trust": "central"}}
CLIENT = {"target_epsilon": 8.0, "delta": 1e-2, "max_update_norm": 0.5, "unit": "client"}
CLIENTS_LOCAL = {**LOCAL, "privacy": {**CLIENT, "trust": "local"}}
CLIENTS_DISTRIBUTED = {**DISTRIBUTED, "privacy": {**CLIENT, "trust": "distributed"}}
CLIENTS_CENTRAL = {**LOCAL, "privacy": {**CLIENT, "trust": "central"}}
POISSON = {"rounds": 3, "clients_per_round": 5, "participation": {"scheme": "poisson"}}
CLIENTS_DRAWN = {**CLIENTS_CENTRAL, "federation": POISSON}
CELLS = {
    "local": LOCAL,
    "distributed": DISTRIBUTED,
    "central": CENTRAL,
    "clients, local": CLIENTS_LOCAL,
    "clients, distributed": CLIENTS_DISTRIBUTED,
    "clients, central": CLIENTS_CENTRAL,
    "clients, drawn in secret": CLIENTS_DRAWN,
}
ADD_REMOVE = {"name": "add_remove", "declared_examples": 100}
MOMENTUM = {"name": "sgd", "lr": 0.5, "momentum": 0.9}

# Cell, key, wrong value, key of the message, words of its fix.
CASES: dict[str, tuple[str, str, Any, str, str]] = {
    "two local steps": ("distributed", "local.steps", 2, "local.steps", "use more rounds"),
    "two local steps, central": ("central", "local.steps", 2, "local.steps", "use more rounds"),
    "momentum inside the client": (
        "distributed", "local.optimizer", MOMENTUM, "local.optimizer", "strategy: fedavgm",
    ),
    "momentum inside the client, central": (
        "central", "local.optimizer", MOMENTUM, "local.optimizer", "strategy: fedavgm",
    ),
    "weight decay": (
        "distributed",
        "local.optimizer",
        {"name": "sgd", "lr": 0.5, "weight_decay": 0.1},
        "local.optimizer",
        "must be sgd without",
    ),
    "another optimizer": (
        "distributed", "local.optimizer", {"name": "adam", "lr": 0.1}, "local.optimizer", "sgd",
    ),
    "no helper": (
        "distributed", "secure_aggregation", None, "privacy.trust", "add secure_aggregation",
    ),
    "uploads in clear": (
        "distributed",
        "secure_aggregation.protocol",
        "quantized",
        "secure_aggregation.protocol",
        "use additive",
    ),
    "as many colluders as clients": (
        "distributed",
        "privacy.trust.colluding_clients",
        8,
        "privacy.trust.colluding_clients",
        "raise min_clients",
    ),
    "no smallest sum": (
        "distributed",
        "secure_aggregation",
        {"aggregators": 2},
        "secure_aggregation",
        "needs min_clients in the file",
    ),
    "a policy for values out of range": (
        "distributed",
        "secure_aggregation.encoding",
        {"range_policy": "clip"},
        "secure_aggregation.encoding.range_policy",
        "remove range_policy",
    ),
    "values clipped after noise": (
        "distributed",
        "secure_aggregation.encoding",
        {"value_bound": 0.5},
        "secure_aggregation.encoding.value_bound",
        "remove value_bound",
    ),
    "another grid": (
        "distributed",
        "secure_aggregation.encoding",
        {"frac_bits": 20},
        "secure_aggregation.encoding.frac_bits",
        "remove frac_bits",
    ),
    "a bound of each client": (
        "distributed", "privacy.clipping", "adaptive", "privacy.clipping", "use flat or automatic",
    ),
    "bounds of layers": (
        "distributed", "privacy.clipping", "per_layer", "privacy.clipping", "use flat or automatic",
    ),
    "shuffled batches": (
        "distributed", "privacy.sampling", "shuffle", "privacy.sampling", "use poisson",
    ),
    "shuffled batches, central": (
        "central", "privacy.sampling", "shuffle", "privacy.sampling", "use poisson",
    ),
    "clients that leave": (
        "distributed",
        "privacy.on_exhausted",
        "withdraw",
        "privacy.on_exhausted",
        "use on_exhausted: refuse",
    ),
    "private sizes": (
        "distributed",
        "privacy.adjacency",
        ADD_REMOVE,
        "privacy.adjacency",
        "use zero_out or replace_one",
    ),
    "sampling of examples": (
        "clients, local", "privacy.sampling", "shuffle", "privacy.sampling", "remove sampling",
    ),
    "batches of examples": (
        "clients, central",
        "privacy.sampling",
        {"name": "poisson", "rate": 0.1},
        "privacy.sampling.rate",
        "remove the rate",
    ),
    "weights by size": (
        "clients, local",
        "federation.weighting",
        "examples",
        "federation.weighting",
        "use weighting: uniform",
    ),
    "clients that are not there": (
        "clients, local",
        "privacy.adjacency",
        ADD_REMOVE,
        "privacy.adjacency",
        "use zero_out or replace_one",
    ),
    "clients that are not there, by schedule": (
        "clients, central",
        "privacy.adjacency",
        ADD_REMOVE,
        "privacy.adjacency",
        "use zero_out or replace_one",
    ),
    "a secret draw of examples": (
        "central",
        "federation",
        POISSON,
        "federation.participation.scheme",
        "use trust: central with unit: client",
    ),
    "a secret draw in local trust": (
        "clients, local",
        "federation",
        POISSON,
        "federation.participation.scheme",
        "use trust: central with unit: client",
    ),
    "a secret draw beside helpers": (
        "clients, drawn in secret",
        "secure_aggregation",
        {**SECURE, "min_clients": 2},
        "federation.participation.scheme",
        "remove secure_aggregation",
    ),
    "a draw that ends a run by its number": (
        "clients, drawn in secret",
        "federation.min_participants",
        3,
        "federation.min_participants",
        "remove min_participants",
    ),
    "a draw with a deadline": (
        "clients, drawn in secret",
        "federation.deadline",
        5.0,
        "federation.deadline",
        "remove deadline",
    ),
    "metrics of examples": (
        "distributed",
        "secure_aggregation.metrics",
        {"train_loss": 10.0},
        "secure_aggregation.metrics",
        "",
    ),
    "scores of clients": (
        "clients, central",
        "evaluation",
        {"holdout": 0.2},
        "evaluation.holdout",
        "",
    ),
    "scores of clients beside sums": (
        "distributed", "evaluation", {"holdout": 0.2}, "evaluation.holdout", "",
    ),
}  # fmt: skip


def changed(cell: str, key: str, value: Any) -> dict[str, Any]:
    content = deepcopy(CELLS[cell])
    *parents, last = key.split(".")
    section: Any = content
    for name in parents:
        section = section[name]
    if value is None:
        del section[last]
    else:
        section[last] = value
    return content


@pytest.mark.parametrize("cell", CELLS)
def test_the_cell_itself_is_sound(cell: str) -> None:
    load_experiment(CELLS[cell])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_condition_that_fails_is_named_with_its_fix(
    case: tuple[str, str, Any, str, str], tmp_path: Path
) -> None:
    cell, key, value, path, fix = case
    file = tmp_path / "e.yaml"
    file.write_text(yaml.safe_dump(changed(cell, key, value)))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(file)
    problems = caught.value.problems
    assert {".".join(map(str, one.path)) for one in problems} == {path}, str(caught.value)
    assert any(fix in one.message for one in problems)
    for one in problems:
        assert one.line is not None
        assert one.column is not None
        assert "\n" not in one.message


LOCAL_CASES = [
    "two local steps", "momentum inside the client",
    "a policy for values out of range", "shuffled batches",
]  # fmt: skip


@pytest.mark.parametrize("name", LOCAL_CASES)
def test_local_trust_needs_none_of_this(name: str) -> None:
    """The refusals are of the sums' theorem: a client that adds all its noise may do these."""
    _, key, value, _, _ = CASES[name]
    section = key.split(".")[0]
    content = deepcopy(LOCAL)
    if section == "secure_aggregation":
        content[section] = {**SECURE, key.split(".")[1]: value}
    else:
        content[section] = {**content[section], key.split(".")[1]: value}
    load_experiment(content)
