"""Strategies: every name of the settings has a class, and FedAvg's update is the mean itself."""

import numpy as np
import pytest

from fedsim.catalog import catalog
from fedsim.protocol.arrays import to_arrays
from fedsim.server.aggregation.strategies import STRATEGIES, FedAvg, strategy_for
from fedsim.server.settings import STRATEGIES as DESCRIPTIONS
from fedsim.server.settings import FederationSettings
from fedsim.server.state import ServerState


def test_every_described_strategy_is_registered_and_listed() -> None:
    assert list(STRATEGIES) == list(DESCRIPTIONS) == list(catalog()["strategies"])
    schema = FederationSettings.model_json_schema()["properties"]["strategy"]
    assert schema.get("enum", [schema.get("const")]) == list(STRATEGIES)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_settings_name_their_strategy(name: str) -> None:
    settings = FederationSettings.model_validate({"rounds": 1, "strategy": name})
    assert type(strategy_for(settings)) is STRATEGIES[name]


def test_fedavg_takes_the_aggregate_as_the_next_model() -> None:
    state = ServerState(to_arrays({"w": np.zeros(3, np.float32)}))
    aggregate = to_arrays({"w": np.ones(3, np.float32)})
    arrays, optimizer = FedAvg(FederationSettings(rounds=1)).update(state, aggregate)
    assert arrays is aggregate
    assert optimizer == {}
