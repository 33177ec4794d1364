"""Unchanged parts of Flower run on the in-process grid."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
    UserConfigValue,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedMedian, Result

from fedsim.protocol.flower_internals import server_identity
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalEngine, LocalGrid


def shifting_client() -> ClientApp:
    """Adds (partition + 1) to the model and counts its rounds in its state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        rounds = int(context.state.config_records.get("count", ConfigRecord({"n": 0}))["n"]) + 1  # pyright: ignore[reportArgumentType]
        context.state["count"] = ConfigRecord({"n": rounds})
        partition = int(context.node_config["partition-id"])
        value = message.content.array_records["arrays"]["w"].numpy() + partition + 1
        message.content["config"] = ConfigRecord({"scribble": partition})
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(value)}),
                "metrics": MetricRecord({"num-examples": partition + 1, "rounds": rounds}),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        value = float(message.content.array_records["arrays"]["w"].numpy()[0])
        metrics = MetricRecord({"num-examples": 1, "value": value})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def serve(main: Callable[[Grid], None], client: ClientApp, num_clients: int = 3) -> None:
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid)

    LocalEngine().execute(app, client, num_clients)


def test_every_abstract_member_of_flowers_grid_is_there() -> None:
    """A new flwr release that adds one must be noticed."""
    assert Grid.__abstractmethods__ == {
        "set_run",
        "run",
        "create_message",
        "get_node_ids",
        "push_messages",
        "pull_messages",
        "send_and_receive",
    }
    assert not LocalGrid.__abstractmethods__


def test_every_app_has_a_copy_of_the_configuration_of_the_run() -> None:
    seen, client, server = [], ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(dict(context.run_config))
        context.run_config["lr"] = 9.0
        return Message(RecordDict(), reply_to=message)

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        seen.append(dict(context.run_config))
        list(grid.send_and_receive(messages(grid, 2)))

    given: dict[str, UserConfigValue] = {"lr": 0.1, "name": "a"}
    LocalEngine(run_config=given).execute(server, client, 2)
    assert seen == [given] * 3
    assert given["lr"] == 0.1


@pytest.mark.parametrize("strategy_type", [FlowerFedAvg, FedMedian])
def test_flowers_strategies_run_unchanged(strategy_type: type[FlowerFedAvg]) -> None:
    results: list[Result] = []

    def main(grid: Grid) -> None:
        strategy = strategy_type(min_available_nodes=3)
        start = ArrayRecord({"w": Array(np.zeros(2))})
        results.append(strategy.start(grid, start, num_rounds=4))

    random.seed(0)  # FedAvg of Flower samples its nodes from the global generator
    serve(main, shifting_client())
    expected = (1 * 1 + 2 * 2 + 3 * 3) / 6 if strategy_type is FlowerFedAvg else 2.0
    np.testing.assert_allclose(results[0].arrays["w"].numpy(), 4 * expected)
    assert results[0].train_metrics_clientapp[4]["rounds"] == 4, "state lives on over rounds"
    assert results[0].evaluate_metrics_clientapp[4]["value"] == pytest.approx(4 * expected)


def messages(grid: Grid, count: int = 3) -> list[Message]:
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros(2))}), "config": ConfigRecord()}
    )
    return [Message(content, node, MessageType.TRAIN) for node in list(grid.get_node_ids())[:count]]


def test_replies_come_in_the_order_of_the_requests_and_one_by_one() -> None:
    trained: list[int] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append(int(context.node_config["partition-id"]))
        return Message(RecordDict(), reply_to=message)

    with server_identity(1):
        grid = LocalGrid(app, 3)
        asked = messages(grid)[::-1]
        replies = grid.send_and_receive(asked)
        assert trained == []
        first = next(replies)
        assert trained == [2]
        nodes = [first.metadata.src_node_id, *(reply.metadata.src_node_id for reply in replies)]
    assert nodes == [message.metadata.dst_node_id for message in asked]
    assert nodes == [FIRST_NODE + 2, FIRST_NODE + 1, FIRST_NODE]


def test_a_client_cannot_write_into_anothers_message() -> None:
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(dict(message.content.config_records["config"]))
        message.content.config_records["config"]["secret"] = 1
        message.content.array_records["arrays"]["w"] = Array(np.ones(1))
        return Message(RecordDict(), reply_to=message)

    with server_identity(1):
        grid = LocalGrid(app, 3)
        asked = messages(grid)
        list(grid.send_and_receive(asked))
    assert seen == [{}, {}, {}]
    np.testing.assert_array_equal(asked[0].content.array_records["arrays"]["w"].numpy(), [0, 0])


def test_what_a_client_raises_is_its_failure_and_its_state_is_kept() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if "charged" in context.state:
            return Message(RecordDict(), reply_to=message)
        context.state["charged"] = ConfigRecord({"epsilon": 1.0})
        raise RuntimeError("power cut")

    with server_identity(1):
        grid = LocalGrid(app, 1)
        (failed,) = grid.send_and_receive(messages(grid))
        (fine,) = grid.send_and_receive(messages(grid))
    assert failed.has_error()
    assert failed.error.reason == "RuntimeError: power cut"
    assert failed.metadata.reply_to_message_id != ""
    assert not fine.has_error()


def test_a_client_that_returns_no_message_fails_alone() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Any:
        return None if context.node_config["partition-id"] == 1 else message

    with server_identity(1):
        grid = LocalGrid(app, 3)
        failed = [reply for reply in grid.send_and_receive(messages(grid)) if reply.has_error()]
    (reason,) = (reply.error.reason for reply in failed)
    assert reason == "TypeError: a client's app must return a Message, got NoneType"


def test_push_and_pull() -> None:
    with server_identity(1):
        grid = LocalGrid(shifting_client(), 2)
        ids = list(grid.push_messages(messages(grid, 2)))
        assert len(set(ids)) == 2
        replies = list(grid.pull_messages(ids))
        assert [reply.metadata.reply_to_message_id for reply in replies] == ids
        assert list(grid.pull_messages(ids)) == []


def test_the_servers_identity_is_put_back() -> None:
    with server_identity(3):
        with server_identity(7):
            assert Message(RecordDict(), 1, MessageType.TRAIN).metadata.run_id == 7
        assert Message(RecordDict(), 1, MessageType.TRAIN).metadata.run_id == 3
