"""Server optimizers against two rounds by hand, and against Flower's own classes."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fedsim.algorithms.algorithm import Training, Update, algorithms
from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import to_arrays
from fedsim.protocol.flower_internals import server_identity

START = np.array([1.0, -2.0, 0.5])
MEANS = [np.array([1.5, -2.25, 0.5]), np.array([1.25, -3.0, 2.0])]
LR, B1, B2, TAU = 0.3, 0.8, 0.9, 0.05


def models(name: str, **options: float) -> list[np.ndarray]:
    """Return the global models of two rounds with the means above."""
    optimizer = algorithms()[name](options, Training(frozenset({"w"})))
    state, found = optimizer.init(ServerState(to_arrays({"w": START}))), []
    for mean in MEANS:
        state = optimizer.server(state, Update({"w": mean}))
        found.append(state.values["w"])
    return found


def test_fedavgm_by_hand() -> None:
    one, two = models("fedavgm", server_lr=0.5, momentum=0.9)
    m = MEANS[0] - START
    np.testing.assert_allclose(one, START + 0.5 * m)
    m = 0.9 * m + (MEANS[1] - one)
    np.testing.assert_allclose(two, one + 0.5 * m)


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_adaptive_optimizers_by_hand(name: str) -> None:
    """Reddi et al. 2021, Algorithm 2, value by value."""
    given = {"server_lr": LR, "beta_1": B1, "tau": TAU}
    found = models(name, **(given if name == "fedadagrad" else {**given, "beta_2": B2}))
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
    adaptive = {"server_lr": LR, "beta_1": B1, "beta_2": B2, "tau": TAU}
    if name == "fedavgm":
        ours: dict[str, Any] = {"server_lr": 0.5, "momentum": 0.9}
        theirs: Any = flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9)
    elif name == "fedadagrad":
        ours = {"server_lr": LR, "beta_1": 0.0, "tau": TAU}
        theirs = flower.FedAdagrad(eta=LR, tau=TAU)
    else:
        kind = {"fedadam": flower.FedAdam, "fedyogi": flower.FedYogi}[name]
        ours, theirs = adaptive, kind(eta=LR, beta_1=B1, beta_2=B2, tau=TAU)
    flat = name == "fedavgm"
    start = ArrayRecord([START]) if flat else {"0": START}
    theirs.current_arrays = start
    if not flat:
        theirs.v_t = {"0": np.full(3, TAU**2)}
    for mean, expected in zip(MEANS, models(name, **ours), strict=True):
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
    optimizer = algorithms()["fedadam"](training=Training(frozenset({"w"})))
    start = {"w": START.astype(np.float32), "var": np.ones(1, np.float32), "n": np.array([3])}
    mean = {
        "w": MEANS[0].astype(np.float32),
        "var": np.full(1, 0.5, np.float32),
        "n": np.array([5]),
    }
    after = optimizer.server(optimizer.init(ServerState(to_arrays(start))), Update(mean))
    found, moments = after.values, after.memory
    assert list(found) == list(start)
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in start.items()
    }
    assert (found["var"], found["n"]) == (0.5, 5)
    assert sorted(moments) == ["m/w", "v/w"]
    assert {value.dtype for value in moments.values()} == {np.dtype(np.float64)}
