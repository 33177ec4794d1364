"""What is refused before a run and what may be said after it are the same conditions."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from fedsim.clients.mechanisms.conditions import CONDITIONS, Choices, unmet
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.experiment.load import with_clients
from fedsim.runs.recorded_terms import recorded_terms
from fedsim.statement import read_facts

VALUES: dict[str, tuple[Any, ...]] = {
    "trust": ("local", "distributed", "central"),
    "unit": ("example", "client"),
    "adjacency": ("zero_out", "add_remove", "replace_one"),
    "sampling": ("poisson", "fixed_size", "shuffle", "balls_and_bins", "cyclic", "cyclic_poisson"),
    "clipping": ("flat", "per_layer", "automatic", "adaptive", "groups"),
    "noise": ("seeded", "secure"),
    "correlation": ("none", "toeplitz", "tree"),
    "mechanism": ("gradient_perturbation", "output_perturbation", "input_perturbation"),
    "local_steps": (1, 2),
    "optimizer": ("sgd", "adam"),
    "draws_clients": (False, True),
    "protocol": (None, "additive", "quantized"),
}


def experiment(choices: Choices) -> dict[str, Any]:
    """Return an experiment file with these choices, and nothing else to refuse."""
    is_client = choices.unit == "client"
    trust: Any = choices.trust
    if trust == "distributed":
        trust = {"name": trust, "colluding_clients": 1}
    privacy: dict[str, Any] = {
        "trust": trust,
        "unit": choices.unit,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "adjacency": choices.adjacency,
        "clipping": choices.clipping,
        "noise": choices.noise,
    }
    if choices.sampling != "poisson":
        privacy["sampling"] = choices.sampling
    if choices.adjacency == "add_remove":
        privacy["adjacency"] = {"name": "add_remove", "declared_examples": 100}
    if choices.clipping == "groups":
        privacy["clipping"] = {"name": "flat", "groups": {"*": {"max_grad_norm": 0.5}}}
    if choices.correlation != "none":
        bands = {"bands": 2} if choices.correlation == "toeplitz" else {}
        privacy["noise_correlation"] = {"name": choices.correlation, **bands}
    if choices.mechanism != "gradient_perturbation":
        privacy["mechanism"] = {"name": choices.mechanism, "max_feature_norm": 1.0}
    elif is_client:
        privacy["max_update_norm"] = 0.5
    elif choices.clipping != "groups":
        privacy["max_grad_norm"] = 0.5
    optimizer = {"name": choices.optimizer, "lr": 0.1}
    if choices.mechanism == "output_perturbation" and choices.optimizer == "sgd":
        optimizer["weight_decay"] = 0.01
    content: dict[str, Any] = {
        "name": "combination",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 6}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 2, "clients_per_round": 6},
        "local": {"steps": choices.local_steps, "batch_size": 16, "optimizer": optimizer},
        "privacy": privacy,
    }
    if choices.correlation != "none" and is_client:
        content["federation"]["participation"] = {"scheme": "min_separation"}
    if choices.draws_clients:
        content["federation"]["participation"] = {"scheme": "poisson"}
        content["federation"]["clients_per_round"] = 3
    if choices.protocol is not None:
        content["secure_aggregation"] = {"protocol": choices.protocol, "min_clients": 4}
    return content


def read_record(choices: Choices) -> Choices | None:
    """Return the choices that a run of the file records; None where the file is refused."""
    try:
        loaded = with_clients(load_experiment(experiment(choices)), 6)
    except ExperimentError:
        return None
    secure = None if choices.protocol is None else {"protocol": choices.protocol}
    record = {**recorded_terms(loaded), "secure_aggregation": secure, "clients": []}
    return read_facts({**record, "version": "1", "slack": None}).choices


def combinations() -> Iterator[Choices]:
    """Yield every pair of values, the rest as by default, and random combinations."""
    default = Choices()
    for one, other in itertools.combinations(VALUES, 2):
        for values in itertools.product(VALUES[one], VALUES[other]):
            yield Choices(**{**vars(default), one: values[0], other: values[1]})
    generator = random.Random(5)
    for _ in range(300):
        yield Choices(**{name: generator.choice(values) for name, values in VALUES.items()})


def test_settings_and_statement_agree_on_every_combination() -> None:
    accepted, failing = 0, set[str]()
    for choices in dict.fromkeys(combinations()):  # most pairs have a default
        recorded, failed = read_record(choices), unmet(choices)
        failing |= set(failed)
        assert recorded is None or not failed, (choices, failed)
        assert recorded is None or not unmet(recorded), (choices, unmet(recorded))
        accepted += recorded is not None
    assert accepted > 60
    assert failing == set(CONDITIONS)


@pytest.mark.parametrize(("trust", "unit"), [("central", "client"), ("distributed", "client")])
def test_every_cell_has_a_combination_that_runs(trust: str, unit: str) -> None:
    protocol = "additive" if trust == "distributed" else None
    recorded = read_record(Choices(trust=trust, unit=unit, protocol=protocol))
    assert recorded is not None
    assert (recorded.trust, recorded.unit, recorded.protocol) == (trust, unit, protocol)
    assert unmet(recorded) == {}


@pytest.mark.parametrize("correlation", ["toeplitz", "tree"])
def test_whole_clients_with_correlated_noise_have_a_guarantee(correlation: str) -> None:
    recorded = read_record(Choices(trust="central", unit="client", correlation=correlation))
    assert recorded is not None
    assert recorded.correlation == correlation
    assert unmet(recorded) == {}


def test_clients_drawn_by_poisson_have_a_guarantee() -> None:
    recorded = read_record(Choices(trust="central", unit="client", draws_clients=True))
    assert recorded is not None
    assert recorded.draws_clients
    assert unmet(recorded) == {}
