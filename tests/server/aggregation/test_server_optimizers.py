"""Server optimizers against two rounds by hand, and against Flower's own classes."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.server.aggregation.strategy_registry import strategy_for
from fedsim.server.settings import FederationSettings
from fedsim.server.state import ServerState
from fedsim.simulation.flower_internals import server_identity

START = np.array([1.0, -2.0, 0.5])
MEANS = [np.array([1.5, -2.25, 0.5]), np.array([1.25, -3.0, 2.0])]
LR, B1, B2, TAU = 0.3, 0.8, 0.9, 0.05


def models(strategy: object, *, dtype: Any = np.float64) -> list[np.ndarray]:
    """Return the global models of two rounds with the means above."""
    settings = FederationSettings.model_validate({"rounds": 2, "strategy": strategy})
    optimizer = strategy_for(settings, parameters=["w"])
    state, found = ServerState(to_arrays({"w": START.astype(dtype)})), []
    for number, mean in enumerate(MEANS, start=1):
        aggregate = to_arrays({"w": mean.astype(dtype)})
        arrays, moments = optimizer.update(state, aggregate)
        state = ServerState(arrays, number, optimizer=moments)
        found.append(to_numpy(arrays)["w"])
    return found


def test_fedavgm_by_hand() -> None:
    one, two = models({"name": "fedavgm", "lr": 0.5, "momentum": 0.9})
    m = MEANS[0] - START
    np.testing.assert_allclose(one, START + 0.5 * m)
    m = 0.9 * m + (MEANS[1] - one)
    np.testing.assert_allclose(two, one + 0.5 * m)


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_adaptive_optimizers_by_hand(name: str) -> None:
    """Reddi et al. 2021, Algorithm 2, value by value."""
    given = {"name": name, "lr": LR, "beta_1": B1, "tau": TAU}
    found = models(given if name == "fedadagrad" else {**given, "beta_2": B2})
    for place in range(3):
        x, m, v = float(START[place]), 0.0, TAU**2
        for number, mean in enumerate(MEANS):
            delta = float(mean[place]) - x
            m = B1 * m + (1 - B1) * delta
            square = delta * delta
            sign = (v > square) - (v < square)
            v = {
                "fedadagrad": v + square,
                "fedadam": B2 * v + (1 - B2) * square,
                "fedyogi": v - (1 - B2) * square * sign,
            }[name]
            x += LR * m / (v**0.5 + TAU)
            assert found[number][place] == pytest.approx(x, rel=1e-12)


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_flower_computes_the_same(name: str) -> None:
    """From v = τ²; Flower corrects Adam's bias, which in a late round is no correction."""
    adaptive = {"lr": LR, "beta_1": B1, "beta_2": B2, "tau": TAU}
    if name == "fedavgm":
        ours: dict[str, Any] = {"lr": 0.5, "momentum": 0.9}
        theirs: Any = flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9)
    elif name == "fedadagrad":
        ours = {"lr": LR, "beta_1": 0.0, "tau": TAU}
        theirs = flower.FedAdagrad(eta=LR, tau=TAU)
    else:
        kind = {"fedadam": flower.FedAdam, "fedyogi": flower.FedYogi}[name]
        ours, theirs = adaptive, kind(eta=LR, beta_1=B1, beta_2=B2, tau=TAU)
    flat = name == "fedavgm"
    start = ArrayRecord([START]) if flat else {"0": START}
    theirs.current_arrays = start
    if not flat:
        theirs.v_t = {"0": np.full(3, TAU**2)}
    for mean, expected in zip(MEANS, models({"name": name, **ours}), strict=True):
        content = RecordDict(
            {"arrays": ArrayRecord([mean]), "metrics": MetricRecord({"num-examples": 1})}
        )
        with server_identity(1):
            message = Message(content, 1, MessageType.TRAIN)
        reply = Message(content, reply_to=message)
        arrays, _ = theirs.aggregate_train(100_000, [reply])
        np.testing.assert_allclose(arrays.to_numpy_ndarrays()[0], expected, rtol=1e-9)
        if not flat:
            theirs.current_arrays = {"0": expected}


def test_buffers_and_counters_take_the_mean_and_types_stay() -> None:
    settings = FederationSettings.model_validate({"rounds": 1, "strategy": "fedadam"})
    optimizer = strategy_for(settings, parameters=["w"])
    start = {"w": START.astype(np.float32), "var": np.ones(1, np.float32), "n": np.array([3])}
    mean = {
        "w": MEANS[0].astype(np.float32),
        "var": np.full(1, 0.5, np.float32),
        "n": np.array([5]),
    }
    arrays, moments = optimizer.update(ServerState(to_arrays(start)), to_arrays(mean))
    found = to_numpy(arrays)
    assert list(found) == list(start)
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in start.items()
    }
    assert (found["var"], found["n"]) == (0.5, 5)
    assert sorted(moments) == ["m/w", "v/w"]
    assert {value.dtype for value in moments.values()} == {np.dtype(np.float64)}
