"""A training round: scheduled clients are asked, and each reply is counted or named as failed."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedsim.algorithms.built_in.fedavg import FedAvg
from fedsim.algorithms.state import ServerState
from fedsim.federation.schedule import StepSchedule
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.protocol.errors import FederationError
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainReply, TrainRequest, Withdrawal
from fedsim.server.aggregation.aggregator import AggregationResult, PlainAggregator
from fedsim.server.aggregation.aggregator import RoundAbortedError as Aborted
from fedsim.server.aggregation.weights import uniform_weights
from fedsim.server.app import RoundError, check_participants, run_round
from fedsim.server.participation.participation import Participation
from fedsim.server.round_parts import OwnBounds
from fedsim.server.train_round import RoundSetup
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import LocalGrid

CLIENTS = 4
ROUNDS = 3


def start(**changes: Any) -> ServerState:
    return ServerState(to_arrays({"w": np.zeros(2, np.float32)}), **changes)


class Clients:
    """Clients that reply with their number, but for the replies named; keeps the requests."""

    def __init__(self, **replies: Any) -> None:
        self.replies = {int(name[1:]): reply for name, reply in replies.items()}
        self.requests: dict[int, TrainRequest] = {}

    def app(self) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = int(cast("int", context.node_config["partition-id"]))
            self.requests[client] = TrainRequest.from_message(message)
            reply = self.replies.get(client)
            if reply is None:
                arrays = {"w": np.full(2, client, np.float32)}
                reply = TrainReply(arrays, 1, None, clip_norm=0.1 * (client + 1))
            if isinstance(reply, str):
                return Message(Error(code=0, reason=reply), reply_to=message)
            return reply.to_message(message)

        return app


def score(model: Any) -> dict[str, float]:
    return {"test_loss": float(to_numpy(model)["w"][0])}


def round_of(
    clients: Clients,
    state: ServerState,
    aggregator: PlainAggregator | None = None,
    algorithm: type[FedAvg] = FedAvg,
    **options: Any,
) -> tuple[ServerState, Any]:
    participation = Participation(0, CLIENTS, CLIENTS, ROUNDS)
    setup = RoundSetup(
        algorithm(),
        participation,
        {FIRST_NODE + client: client for client in range(CLIENTS)},
        aggregator or PlainAggregator(uniform_weights(CLIENTS)),
        score,
        uniform_weights(CLIENTS),
        StepSchedule(participation, (1,) * CLIENTS),
        parts=(OwnBounds(),),
        **options,
    )
    with server_identity(1):
        return run_round(state, setup, LocalGrid(clients.app(), CLIENTS))


def test_the_next_state_is_the_mean_of_the_replies_and_the_old_state_stays() -> None:
    before = start()
    after, report = round_of(Clients(), before)
    np.testing.assert_array_equal(to_numpy(after.arrays)["w"], [1.5, 1.5])
    assert (before.round_number, after.round_number, report.round_number) == (0, 1, 1)
    assert report.clients.participants == (0, 1, 2, 3)
    assert report.metrics == {"test_loss": 1.5}
    np.testing.assert_array_equal(to_numpy(before.arrays)["w"], [0, 0])


def test_a_failed_client_is_named_and_left_out_of_the_mean() -> None:
    after, report = round_of(Clients(_1="broken"), start())
    np.testing.assert_allclose(to_numpy(after.arrays)["w"], 5 / 3)
    assert [(one.client, one.reason) for one in report.clients.failed] == [(1, "broken")]
    assert report.clients.participants == (0, 2, 3)


def test_a_withdrawn_client_is_never_asked_again() -> None:
    after, report = round_of(Clients(_2=Withdrawal(2, "spent")), start())
    assert after.withdrawn == {2}
    assert [one.client for one in report.clients.withdrawn] == [2]
    later = Clients()
    last, second = round_of(later, after)
    assert sorted(later.requests) == [0, 1, 3]
    assert last.withdrawn == {2}
    assert second.clients.withdrawn == ()


def test_a_client_outside_the_aggregate_keeps_its_clipping_bound() -> None:
    clients = Clients(_3="broken")
    after, _ = round_of(clients, start(clip_norms={0: 9.0, 3: 7.0}))
    assert {client: one.clip_norm for client, one in clients.requests.items()} == {
        0: 9.0,
        1: None,
        2: None,
        3: 7.0,
    }
    assert after.clip_norms == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3, 3: 7.0})


def test_a_reply_past_the_deadline_is_not_in_the_mean() -> None:
    late = TrainReply({"w": np.full(2, 100, np.float32)}, 1, None, delay=5.0)
    after, report = round_of(Clients(_0=late), start(), deadline=4.0)
    np.testing.assert_array_equal(to_numpy(after.arrays)["w"], [2, 2])
    assert "past the deadline of 4 s" in report.clients.failed[0].reason


@pytest.mark.parametrize("when", ["begin", "finish"])
def test_an_aborted_round_leaves_the_model_as_it_was(when: str) -> None:
    class Broken(PlainAggregator):
        def begin(self, round_number: int, arrays: Any, clients: Sequence[int], grid: Grid) -> None:
            super().begin(round_number, arrays, clients, grid)
            if when == "begin":
                raise Aborted("no helper")

        def finish(self) -> AggregationResult:
            raise Aborted("no helper")

    clients = Clients()
    before = start()
    after, report = round_of(clients, before, Broken(uniform_weights(CLIENTS)))
    assert after.arrays is before.arrays
    assert report.aborted == "no helper"
    assert report.clients.participants == ()
    assert len(clients.requests) == (0 if when == "begin" else CLIENTS)
    assert len(report.clients.failed) == (0 if when == "begin" else CLIENTS)
    assert after.clip_norms == {}


def test_a_round_with_too_few_updates_is_an_error_that_holds_its_report() -> None:
    _, report = round_of(Clients(_0="broken", _1="broken", _2="broken"), start())
    check_participants(report, 1)
    with pytest.raises(RoundError, match="3 clients failed and 1 of at least 2") as caught:
        check_participants(report, 2)
    assert caught.value.report is report


def test_a_reply_without_content_is_a_failure() -> None:
    class Nothing:
        def to_message(self, request: Message) -> Message:
            return Message(RecordDict(), reply_to=request)

    _, report = round_of(Clients(_0=Nothing()), start())
    assert report.clients.failed[0].client == 0
    assert "a train reply needs the records" in report.clients.failed[0].reason


@pytest.mark.parametrize(
    ("method", "value", "why"),
    [
        ("weight", float("nan"), "ValueError: weight returned nan, and must return a finite"),
        ("weight", -1.0, "ValueError: weight returned -1.0"),
        ("weight", "heavy", "could not convert string to float"),
        ("scored_models", [], "ValueError: scored_models returned no model"),
        ("scored_models", [3], "TypeError"),
    ],
)
def test_a_wrong_answer_of_an_algorithm_is_named(method: str, value: object, why: str) -> None:
    own = type("Own", (FedAvg,), {method: lambda self, given: value})
    with pytest.raises(FederationError, match=f"federation.strategy failed with.*{why}"):
        round_of(Clients(), start(), algorithm=own)
