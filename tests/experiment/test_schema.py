import json
from typing import Any

import jsonschema
import pytest
import yaml

from fedsim.experiment import dump_experiment, json_schema, load_experiment

# The example of the design document, with the keys that this version supports.
EXAMPLE = """\
name: digits-dp
seed: 0
data:
  dataset: digits
  test_fraction: 0.2
  partition: {scheme: dirichlet, num_clients: 10, alpha: 0.5, min_examples: 20}
model:
  name: mlp
  args: {hidden: [32]}
  loss: cross_entropy
federation:
  rounds: 40
  clients_per_round: 10
  strategy: fedavg
  weighting: uniform
local:
  steps: 5
  batch_size: 28
  optimizer: {name: sgd, lr: 1.0}
privacy:
  target_epsilon: 8.0
  delta: 1.0e-3
  max_grad_norm: 0.5
  clipping: flat
  sampling: poisson
  adjacency: zero_out
  accountant: pld
runtime: {engine: local, workers: 1, device: auto}
"""


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_names_itself_and_is_json() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "fedsim experiment"
    for name, section in schema["properties"].items():
        assert section.get("description"), name


def test_the_example_of_the_design_is_valid(write, validator: Any) -> None:
    loaded = load_experiment(write(EXAMPLE))
    validator.validate(yaml.safe_load(EXAMPLE))
    validator.validate(yaml.safe_load(dump_experiment(loaded.experiment)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dataset: digits", "dataset: {path: x.csv, target: y}"),
        ("scheme: dirichlet, num_clients: 10, alpha: 0.5", "scheme: iid, num_clients: 3"),
        ("{name: sgd, lr: 1.0}", "{name: adamw, lr: 1, weight_decay: 0.1}"),
        ("clients_per_round: 10", "clients_per_round: null"),
        ("seed: 0\n", ""),
        ("clipping: flat", "clipping: {name: per_layer, rule: by_dimension}"),
        ("clipping: flat", "clipping: automatic\n  noise: secure"),
        ("adjacency: zero_out", "adjacency: replace_one"),
        ("sampling: poisson", "sampling: balls_and_bins"),
    ],
)
def test_good_variations(validator: Any, old: str, new: str) -> None:
    validator.validate(yaml.safe_load(EXAMPLE.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 0", "sead: 0"),
        ("name: digits-dp", "name: a b"),
        ("name: digits-dp", "x: 1"),
        ("rounds: 40", "rounds: ten"),
        ("rounds: 40", "rounds: 0"),
        ("rounds: 40", "rounds: true"),
        ("dataset: digits", "dataset: {path: x.csv}"),
        ("scheme: dirichlet", "scheme: iid"),
        ("scheme: dirichlet", "scheme: other"),
        ("name: sgd", "name: adam, momentum: 0.9"),
        ("delta: 1.0e-3", "delta: 1"),
        ("clipping: flat", "clipping: layerwise"),
        ("engine: local", "engine: spark"),
    ],
)
def test_bad_variations(validator: Any, old: str, new: str) -> None:
    assert old in EXAMPLE
    assert not validator.is_valid(yaml.safe_load(EXAMPLE.replace(old, new)))
