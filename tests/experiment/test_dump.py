from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.core.limits import MAX_NUMBER
from fedsim.experiment import Experiment, dump_experiment, load_experiment
from fedsim.experiment.schema import flat_settings

numbers = st.floats(min_value=1e-300, max_value=MAX_NUMBER)
counts = st.integers(1, 10_000)
fractions = st.floats(1e-300, 1, exclude_max=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LOOKS_LIKE_YAML = "1e5 1e-05 0o7 010 yes no ~ null .inf 1_0 12:30:00 = << # ' \" % @ *a ? -"
LOOKS_EMPTY_OR_LONG = ["", " ", "- a", "a: b", " a", "\x85", "\u2028", "\ufeff", "a\n b\n", "\t"]
tricky = st.sampled_from([*LOOKS_LIKE_YAML.split(), *LOOKS_EMPTY_OR_LONG])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    tricky,
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(texts | tricky, inner, max_size=3)
    ),
    max_leaves=10,
)
arguments = st.dictionaries(texts | tricky, trees, max_size=4)


def section(required: Mapping[str, Any], **optional: st.SearchStrategy[Any]) -> Any:
    return st.fixed_dictionaries(dict(required), optional=optional)


partitions = st.one_of(
    section({"scheme": st.just("iid"), "num_clients": counts}, min_examples=counts),
    section({"scheme": st.just("dirichlet"), "num_clients": counts}, alpha=numbers),
    section({"scheme": st.just("shards"), "num_clients": counts}, classes_per_client=counts),
    section({"scheme": st.just("quantity"), "num_clients": counts}, alpha=numbers),
)
models = st.one_of(
    st.just({"name": "logistic"}),
    st.just({"name": "logistic", "args": {"bias": False}}),
    section({"name": st.just("mlp")}, args=section({}, hidden=st.lists(counts, min_size=1))),
    section({"name": st.just("pkg.mod:build")}, args=arguments, loss=st.just("mse")),
)
optimizers = st.one_of(
    section({"name": st.just("sgd"), "lr": numbers}, momentum=fractions, weight_decay=numbers),
    section({"name": st.sampled_from(["adam", "adamw"]), "lr": numbers | counts}),
)
noise = st.sampled_from(["target_epsilon", "noise_multiplier"]).flatmap(
    lambda key: section({key: numbers, "delta": fractions, "max_grad_norm": numbers})
)
experiments = section(
    {
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True),
        "data": section(
            {"dataset": st.just("pkg:load"), "partition": partitions},
            args=arguments,
            test_fraction=fractions | st.none(),
        ),
        "model": models,
        "federation": section({"rounds": counts}, clients_per_round=st.just(1)),
        "local": section({"steps": counts, "batch_size": counts}, optimizer=optimizers),
        "privacy": noise | st.none(),
    },
    seed=st.integers(0, 2**63 - 1),
    runtime=section({}, device=st.sampled_from(["auto", "cpu", "cuda"])),
)


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(raw=experiments)
def test_what_is_dumped_is_loaded_back_equal(tmp_path: Path, raw: dict[str, Any]) -> None:
    experiment = Experiment.model_validate(raw)
    path = tmp_path / "exp.yaml"
    path.write_text(dump_experiment(experiment), encoding="utf-8")
    for loaded in (load_experiment(path), load_experiment(raw)):
        assert loaded.experiment.model_dump() == experiment.model_dump()


def test_the_dump_has_every_default_in_the_order_of_the_schema(write, good: str) -> None:
    text = dump_experiment(load_experiment(write(good)).experiment)
    assert (
        text
        == """\
name: demo
seed: 7
data:
  dataset: digits
  args: {}
  features: numbers
  images: null
  test_fraction: 0.2
  partition:
    num_clients: 10
    min_examples: 1
    scheme: dirichlet
    alpha: 0.5
model:
  name: mlp
  args:
    hidden: [32]
    activation: relu
  features: []
  init: null
  freeze: []
  train: []
  lora: null
  loss: cross_entropy
federation:
  rounds: 4
  clients_per_round: 10
  participation:
    scheme: uniform
  partial_work: null
  deadline: null
  min_participants: 1
  strategy: fedavg
  early_stopping: null
  ema_decay: null
  weighting: uniform
local:
  steps: 5
  epochs: null
  batch_size: 28
  max_physical_batch: null
  optimizer:
    name: sgd
    lr: 1.0
    momentum: 0.0
    weight_decay: 0.0
  gradient: backward
  lr_schedule: null
  augmentation_multiplicity: 1
  augmentations: null
  vectorized_clients: auto
privacy:
  trust: local
  unit: example
  target_epsilon: null
  noise_multiplier: 1.1
  delta: 0.001
  max_grad_norm: 0.5
  max_update_norm: null
  mechanism: gradient_perturbation
  clipping:
    name: flat
    groups: {}
  sampling:
    name: poisson
    rate: null
  noise: seeded
  noise_correlation: none
  adjacency: zero_out
  accountant: pld
  on_exhausted: refuse
  clients: {}
secure_aggregation: null
evaluation: null
personalization: null
task: federated
pate: null
faults: []
runtime:
  engine: local
  workers: 1
  address: null
  device: auto
  trackers: []
"""
    )


def test_other_yaml_readers_see_the_same_values(write, good: str) -> None:
    """The dump is plain YAML 1.1 as well: 1e-05 is a number, 'no' a string, for PyYAML too."""
    overrides = ["privacy.delta=1e-5", "name=no", "data.dataset=pkg:f", "data.args={a: '1e5'}"]
    experiment = load_experiment(write(good), overrides).experiment
    assert yaml.safe_load(dump_experiment(experiment)) == experiment.model_dump()


def test_strings_beyond_ascii_stay_readable(write, good: str) -> None:
    overrides = ["data.dataset=pkg:f", "data.args={ε: größe}"]
    text = dump_experiment(load_experiment(write(good), overrides).experiment)
    assert "ε: größe" in text


def test_a_name_is_the_mapping_with_its_defaults(write, good: str) -> None:
    name = load_experiment(write(good), ["privacy.clipping=adaptive"]).experiment
    mapping = "{name: adaptive, quantile: 0.5, groups: {}}"
    assert load_experiment(write(good), [f"privacy.clipping={mapping}"]).experiment == name
    assert "  trust: local\n" in dump_experiment(name)  # no other keys, so the name is enough


def test_flat_settings_have_a_choice_under_its_key(write, good: str) -> None:
    changes = ["privacy.clipping=adaptive", "privacy.clipping.quantile=0.3"]
    found = flat_settings(load_experiment(write(good), changes).experiment)
    own = {key: value for key, value in found.items() if key.startswith("privacy.clipping")}
    assert own == {"privacy.clipping": "adaptive", "privacy.clipping.quantile": 0.3}
    assert found["privacy.sampling"] == "poisson"
    assert found["privacy.clients"] == {}
    assert found["model.name"] == "mlp"
