"""Algorithms: every name has a class, settings and a declaration; own classes are checked."""

from pathlib import Path

import numpy as np
import pytest

from fedsim.algorithms.algorithm import AlgorithmSettings, Training, Update, algorithms
from fedsim.algorithms.state import ServerState
from fedsim.catalog import catalog
from fedsim.federation.first_checks import AlgorithmError, algorithm_for, check_algorithm
from fedsim.protocol.arrays import to_arrays
from fedsim.server.settings import FederationSettings

OWN = """
from pydantic import Field
from fedsim.core.settings import Settings
from fedsim.algorithms.algorithm import Algorithm

class Options(Settings):
    gain: float = Field(default=0.5, gt=0)

class Half(Algorithm):
    Options = Options
    takes_weights = False

    def server(self, state, update):
        model, gain = dict(update.mean), self.options.gain
        model |= {name: x + gain * (model[name] - x) for name, x in self.trained(state)}
        return state.with_model(model)

class Fails(Half):
    def server(self, state, update):
        return state.with_model(state.memory["moments"])

class Renames(Half):
    def server(self, state, update):
        return type(state)(type(state.arrays)({"other": list(state.arrays.values())[0]}))

class Scores(Half):
    def scored_models(self, state):
        return [{"other": value} for value in state.values.values()]

class NaN(Half):
    def server(self, state, update):
        return state.with_model({name: value * float("nan") for name, value in update.mean.items()})

class Abstract(Algorithm):
    pass

def function(settings):
    return settings
"""


def settings_of(strategy: object) -> AlgorithmSettings:
    return FederationSettings.model_validate({"rounds": 1, "strategy": strategy}).algorithm


def check(strategy: object, base: Path) -> None:
    settings = settings_of(strategy)
    training = Training(frozenset({"w"}), 3)
    found = algorithm_for(settings, base=base, training=training)
    check_algorithm(found, settings.name, to_arrays({"w": np.ones(2, np.float32)}))


def test_every_algorithm_is_listed_with_a_line_of_its_own() -> None:
    listed = catalog()["strategies"]
    assert list(listed) == list(algorithms())
    assert len(set(listed.values())) == len(listed)
    assert all(listed.values())


@pytest.mark.parametrize("name", list(algorithms()))
def test_settings_name_their_algorithm_and_two_rounds_of_it_keep_the_layout(
    name: str, tmp_path: Path
) -> None:
    settings = settings_of(name)
    algorithm = algorithm_for(settings)
    assert type(algorithm) is algorithms()[name]
    written = algorithm.options.model_dump()
    assert settings.options == ({} if name == "fedavg" else written), "written out"
    check(name, tmp_path)


def test_fedavg_takes_the_mean_as_the_next_model() -> None:
    state = ServerState(to_arrays({"w": np.zeros(3, np.float32)}))
    mean = {"w": np.full(3, 0.1, np.float32)}
    after = algorithms()["fedavg"]().server(state, Update(mean))
    np.testing.assert_array_equal(after.values["w"], mean["w"])


def test_an_own_algorithm_is_a_class_with_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    check({"name": "./own.py:Half", "gain": 0.25}, tmp_path)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("./own.py:function", "is no algorithm: write a class that derives from"),
        ("./own.py:Abstract", "is no algorithm"),
        ("./own.py:Missing", "has no 'Missing'"),
        ({"name": "./own.py:Half", "gian": 1.0}, "refuses gian: .* its settings are gain"),
        ({"name": "./own.py:Half", "gain": 0.0}, "refuses gain: "),
        ("./own.py:Fails", r"failed on the initial model with KeyError: 'moments' \(own.py, line"),
        ("./own.py:NaN", "returned NaN or infinite values in 'w'"),
        ("./own.py:Renames", "returned another layout than the model's"),
        ("./own.py:Scores", "returned another layout than the model's: {'other'"),
    ],
)
def test_a_wrong_algorithm_is_refused_in_one_line(
    tmp_path: Path, strategy: object, message: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)

    with pytest.raises(AlgorithmError, match=message) as caught:
        check(strategy, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("state.memory['v/w']", r"write init\(self, state\), .* state.with_memory\(\{'v/w': array"),
        ("update.models['w']", "update.models is empty without uses_each_update = True$"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_the_line_that_puts_it_there(
    tmp_path: Path, line: str, hint: str
) -> None:
    source = OWN.replace('state.memory["moments"]', line)
    assert source != OWN
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(AlgorithmError, match=hint):
        check("./own.py:Fails", tmp_path)
