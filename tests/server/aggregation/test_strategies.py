"""Strategies: every name has a class and settings; FedAvg's update is the mean itself."""

from pathlib import Path

import numpy as np
import pytest

from fedsim.catalog import catalog
from fedsim.protocol.arrays import to_arrays
from fedsim.server.aggregation.strategies import FedAvg
from fedsim.server.aggregation.strategy_registry import (
    STRATEGIES,
    StrategyError,
    check_strategy,
    strategy_for,
)
from fedsim.server.aggregation.strategy_settings import STRATEGIES as ENTRIES
from fedsim.server.settings import FederationSettings
from fedsim.server.state import ServerState

OWN = """
from pydantic import Field
from fedsim.core.settings import Settings
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.server.aggregation.strategies import Strategy

class Options(Settings):
    gain: float = Field(default=0.5, gt=0)

class Half(Strategy):
    Options = Options
    takes_weights = False

    def update(self, state, aggregate):
        start, gain = to_numpy(state.arrays), self.options.gain
        model = {k: start[k] + gain * (v - start[k]) for k, v in to_numpy(aggregate).items()}
        return to_arrays({k: v.astype(start[k].dtype) for k, v in model.items()}), state.optimizer

class Fails(Half):
    def update(self, state, aggregate):
        raise KeyError("moments")

class Renames(Half):
    def update(self, state, aggregate):
        return to_arrays({"other": list(to_numpy(aggregate).values())[0]}), {}

class Abstract(Strategy):
    pass

def function(settings):
    return settings
"""


def settings_of(strategy: object) -> FederationSettings:
    return FederationSettings.model_validate({"rounds": 1, "strategy": strategy})


def test_every_described_strategy_is_registered_and_listed() -> None:
    assert list(STRATEGIES) == list(ENTRIES) == list(catalog()["strategies"])
    for name, kind in STRATEGIES.items():
        assert kind.Options is ENTRIES[name].settings


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_settings_name_their_strategy(name: str) -> None:
    settings = settings_of(name)
    strategy = strategy_for(settings)
    assert type(strategy) is STRATEGIES[name]
    assert strategy.options == ENTRIES[name].settings()
    assert settings.strategy_settings.options == strategy.options.model_dump(), "written out"


def test_fedavg_takes_the_aggregate_as_the_next_model() -> None:
    state = ServerState(to_arrays({"w": np.zeros(3, np.float32)}))
    aggregate = to_arrays({"w": np.ones(3, np.float32)})
    arrays, optimizer = FedAvg(FederationSettings(rounds=1)).update(state, aggregate)
    assert arrays is aggregate
    assert optimizer == {}


def test_an_own_strategy_is_a_class_with_settings_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = settings_of({"name": "./own.py:Half", "gain": 0.25})
    strategy = strategy_for(settings, base=tmp_path)
    check_strategy(strategy, to_arrays({"w": np.ones(2, np.float32)}))
    assert strategy.options.model_dump() == {"gain": 0.25}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("./own.py:function", "is no strategy: write a class that derives from"),
        ("./own.py:Abstract", "is no strategy"),
        ("./own.py:Missing", "has no 'Missing'"),
        ({"name": "./own.py:Half", "gian": 1.0}, "refuses gian: .* its settings are gain"),
        ({"name": "./own.py:Half", "gain": 0.0}, "refuses gain: "),
        ("./own.py:Fails", r"failed on the initial model with KeyError: 'moments' \(own.py, line"),
        ("./own.py:Renames", "returned another layout than the model's"),
    ],
)
def test_a_wrong_strategy_is_refused_in_one_line(
    tmp_path: Path, strategy: object, message: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def start() -> None:
        found = strategy_for(settings_of(strategy), base=tmp_path)
        check_strategy(found, to_arrays({"w": np.ones(2, np.float32)}))

    with pytest.raises(StrategyError, match=message) as caught:
        start()
    assert "\n" not in str(caught.value)
