from pathlib import Path

import pytest

from fedsim.clients.local_settings import AdamSettings
from fedsim.data.settings import FunctionPartition, IidPartition, QuantityPartition, ShardsPartition
from fedsim.experiment import Experiment, ExperimentError, load_experiment
from fedsim.experiment.overrides import Override
from fedsim.experiment.yaml_loader import Location, Node


@pytest.fixture
def load(write, good: str):
    path = write(good)

    def load_with(*overrides: str) -> Experiment:
        return load_experiment(path, overrides).experiment

    return load_with


@pytest.fixture
def lines(load):
    def lines_with(*overrides: str) -> list[str]:
        with pytest.raises(ExperimentError) as caught:
            load(*overrides)
        return str(caught.value).splitlines()

    return lines_with


def test_values_are_read_as_yaml(load) -> None:
    experiment = load(
        "federation.rounds=010",
        "privacy.delta=1e-5",
        "name=no",
        "model.args={hidden: [8, 4]}",
        "federation.clients_per_round=null",
        " seed = 3 ",
    )
    assert experiment.federation.rounds == 10
    assert experiment.federation.clients_per_round is None
    assert experiment.privacy is not None
    assert experiment.privacy.delta == 1e-5
    assert experiment.name == "no"
    assert experiment.model.args["hidden"] == [8, 4]
    assert experiment.seed == 3


def test_a_value_may_hold_an_equals_sign(lines) -> None:
    assert lines("name=a=b")[0].endswith("got 'a=b'")


def test_the_last_override_of_a_key_counts(load) -> None:
    assert load("seed=1", "seed=2").seed == 2


def test_a_mapping_gives_values_as_they_are(write, good: str) -> None:
    overrides = {"federation.rounds": 5, "privacy": None, "model.args.hidden": (1, 2)}
    experiment = load_experiment(write(good), overrides).experiment
    assert experiment.federation.rounds == 5
    assert experiment.privacy is None
    assert experiment.model.args["hidden"] == [1, 2]


def test_one_string_is_one_override(write, good: str) -> None:
    assert load_experiment(write(good), "seed=9").experiment.seed == 9


def test_null_turns_a_section_off_and_keys_make_one(load, write, good: str) -> None:
    assert load("privacy=null").privacy is None
    without = write(good[: good.index("privacy:")])
    overrides = ["privacy.delta=1e-5", "privacy.max_grad_norm=1", "privacy.target_epsilon=2"]
    experiment = load_experiment(without, overrides).experiment
    assert experiment.privacy is not None
    assert experiment.privacy.target_epsilon == 2
    off_and_on = load("privacy=null", *overrides)
    assert off_and_on.privacy == experiment.privacy


def test_a_made_section_is_checked_like_any_other(write, good: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good[: good.index("privacy:")]), ["privacy.delta=1e-5"])
    assert str(caught.value) == (
        "command line: privacy: unit: example needs max_grad_norm, the L2 bound of what one "
        "example contributes"
    )


def test_items_of_lists_are_set_by_number(load) -> None:
    hidden = load("model.args.hidden=[8, 4]", "model.args.hidden.1=5").model.args["hidden"]
    assert hidden == [8, 5]


def test_another_variant_takes_the_keys_of_the_former_one_away(load) -> None:
    assert load("data.partition.scheme=iid").data.partition == IidPartition(
        scheme="iid", num_clients=10
    )
    assert load("data.partition.scheme=quantity").data.partition == QuantityPartition(
        scheme="quantity", num_clients=10, alpha=0.5
    )
    assert load("data.partition.scheme=my.code:divide").data.partition == FunctionPartition(
        scheme="my.code:divide", num_clients=10
    )
    assert load(
        "data.partition.scheme=shards", "data.partition.classes_per_client=3"
    ).data.partition == ShardsPartition(scheme="shards", num_clients=10, classes_per_client=3)
    assert load(
        "local.optimizer.momentum=0.9", "local.optimizer={name: adam, lr: 0.1}"
    ).local.optimizer == AdamSettings(name="adam", lr=0.1)


def test_another_model_takes_the_arguments_of_the_former_one_away(load, lines) -> None:
    assert "hidden" not in load("model.name=logistic").model.args
    wide = load("model.name=cnn", "model.args.hidden=7").model.args
    assert (wide["hidden"], wide["channels"]) == (7, [16, 32])
    assert load("model.name=mlp", "model.args.activation=tanh").model.args["hidden"] == [32]
    (line,) = lines("model.args.hidden=[4]", "model.name=logistic")
    assert line.startswith("command line: model.args.hidden: ")


def test_but_not_keys_of_the_command_line_and_not_misspelt_ones(lines, write, good: str) -> None:
    assert lines("data.partition.alpha=2", "data.partition.scheme=iid") == [
        "command line: data.partition.alpha: unknown key for scheme 'iid'; "
        "it belongs to 'dirichlet' or 'quantity'"
    ]
    path = write(good.replace("alpha: 0.5", "alpa: 0.5"))
    with pytest.raises(ExperimentError, match=r"exp.yaml:6:51: data.partition.alpa: unknown key"):
        load_experiment(path, ["data.partition.scheme=iid"])


WRONG = {
    "privacy.noise_multipler=1": "privacy.noise_multipler: unknown key; "
    "did you mean 'noise_multiplier'?",
    "runtime.vectorized_clients=off": "runtime.vectorized_clients: unknown key here; it "
    "belongs to local",
    "federation.rounds=ten": "federation.rounds: must be a whole number, got 'ten'",
    "federation.rounds=-1": "federation.rounds: must be >= 1, got -1",
    "federation.rounds.x=1": "federation.rounds.x: federation.rounds is a single value and has "
    "no keys",
    "model.args.hidden.1=3": "model.args.hidden.1: model.args.hidden has 1 item, counted from 0",
    "model.args.hidden.-1=3": "model.args.hidden.-1: model.args.hidden is a list; "
    "use the number of an item",
    "model.args.hidden.0=0": "model.args.hidden.0: must be >= 1, got 0",
    "model.args.hidden.0.x=0": "model.args.hidden.0.x: model.args.hidden.0 is a single value and "
    "has no keys",
    "data.partition={scheme: iid, num_cleints: 2}": "data.partition.num_cleints: unknown key; "
    "did you mean 'num_clients'?",
    "federation.rounds=": "federation.rounds: no value after '='; write null for no value, "
    "'' for an empty string",
    "federation.rounds=[": "federation.rounds: not valid YAML: a value is missing here",
    "federation.rounds=!!int 3": "federation.rounds: tag !!int is not allowed; write the value",
    "model.args={hidden: [1], hidden: [2]}": "model.args.hidden: duplicate key; write it once",
    "name=a\x00": "name: character U+0000 is not allowed in YAML",
    "name=\udcff": "name: character U+DCFF is not allowed in YAML",
    "rounds": "'rounds' is not an override; write key.path=value",
    "=3": "'' is not a key; write key.path=value",
    "a..b=3": "'a..b' is not a key; write key.path=value",
    "secure_aggregation.min_clients=11": "secure_aggregation.min_clients: must be at most 10, the "
    "clients of a round, got 11; lower it, or raise federation.clients_per_round",
    "federation.clients_per_round=11": "federation.clients_per_round: must be <= "
    "data.partition.num_clients (10), got 11",
    ".".join("a" * 5000) + "=1": "'a.a.a.a.a.a.a.a.a.a.a.a.a.a...a.a.a.a.a.a.a.a.a.a.a.a.a.a' "
    "is not a key; write key.path=value",
}


@pytest.mark.parametrize(("override", "line"), WRONG.items())
def test_mistakes_are_located_at_the_command_line(lines, override: str, line: str) -> None:
    assert lines(override) == [f"command line: {line}"]


def test_mistakes_of_file_and_command_line_come_together_overrides_last(write, good: str) -> None:
    path = write(good.replace("seed: 7", "seed: x"))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path, ["name=a b", "privacy.delta=2", "nonsense"])
    places = [(problem.source, problem.path) for problem in caught.value.problems]
    assert places[0] == ("exp.yaml", ("seed",))
    assert {place for place in places[1:]} == {
        ("command line", ("name",)),
        ("command line", ("privacy", "delta")),
        ("command line", ()),
    }


def test_a_file_that_cannot_be_read_does_not_hide_them(write) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write("a: [\n"), ["nonsense"])
    assert str(caught.value).splitlines() == [
        "exp.yaml:2:1: not valid YAML: a value is missing here",
        "command line: 'nonsense' is not an override; write key.path=value",
    ]


def test_an_override_mends_the_file(write, good: str) -> None:
    path = write(good.replace("rounds: 4", "rounds: ten"))
    assert load_experiment(path, ["federation.rounds=2"]).experiment.federation.rounds == 2


def test_an_override_changes_one_use_of_an_alias_only(write, good: str) -> None:
    text = good.replace("dataset: digits", "dataset: pkg:f\n  args: &a {x: {y: 1}}")
    text = text.replace("name: mlp", "name: pkg:g").replace("{hidden: [32]}", "*a")
    experiment = load_experiment(write(text), ["model.args.x.y=2"]).experiment
    assert experiment.data.args == {"x": {"y": 1}}
    assert experiment.model.args == {"x": {"y": 2}}


def test_a_name_becomes_a_mapping_when_one_of_its_keys_is_set(load, lines, write, good) -> None:
    """In the file and without a line in it; another name takes the keys of the former one away."""
    name, key = "secure_aggregation.protocol", "secure_aggregation.protocol.threshold=8"
    chosen = load(f"{name}=secagg", key).secure_aggregation
    assert chosen is not None
    assert chosen.protocol.model_dump() == {"name": "secagg", "threshold": 8}
    (line,) = lines(key)
    assert line == (
        "command line: secure_aggregation.protocol.threshold: unknown key for name 'additive'; "
        "it belongs to 'secagg'"
    )
    written = "secure_aggregation: {protocol: {name: secagg, threshold: 8}, aggregators: 2}\n"
    other = load_experiment(write(good + written), [f"{name}.name=secagg_plus"]).experiment
    assert other.secure_aggregation is not None
    assert other.secure_aggregation.protocol.name == "secagg_plus"


def test_an_override_can_bring_its_own_location(write, good: str) -> None:
    node = Node(-1, Location("compare.yaml", 4, 9))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good), [Override(("federation", "rounds"), node)])
    assert str(caught.value) == "compare.yaml:4:9: federation.rounds: must be >= 1, got -1"


def test_values_of_a_mapping_must_be_what_yaml_can_hold(write, good: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good), {"data.args": {"f": Path, "g": [b"x"]}})
    assert str(caught.value).splitlines() == [
        "command line: data.args.f: a type cannot be written in YAML, and only data.dataset, "
        "model.name and model.loss take Python objects; write it into a file and name it "
        "./file.py:Path",
        "command line: data.args.g.0: a bytes cannot be written in YAML",
        "command line: data.args: the built-in dataset 'digits' takes no arguments; remove args",
    ]
