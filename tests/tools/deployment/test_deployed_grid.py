"""A SuperNode that is restarted during a request fails at once; nobody waits for its answer."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.errors import NODE_RESTARTED
from fedsim.protocol.flower_internals import server_identity, set_message_id
from fedsim.protocol.secure import HELLO, make_reply
from fedsim.protocol.traffic import NO_REPLY, ClientError, PatientGrid, exchange
from fedsim.secagg.messages import Hello, HelloReply
from fedsim.server.secure.rounds import QueryChannel
from fedsim.tools.deployment.server_app import DeployedGrid

NODES = (11, 12)


class Link:
    """A SuperLink whose nodes answer, and are activated, at the looks that the script names."""

    def __init__(self, **script: Any) -> None:
        self.script = script
        self.looks = 0
        self.sent: dict[str, Message] = {}

    def get_nodes(self) -> Iterable[Any]:
        restarts = self.script.get("restarts", {})
        return [
            SimpleNamespace(
                node_id=node, last_activated_at=str(restarts.get(node, 99) <= self.looks)
            )
            for node in NODES
            if self.looks not in self.script.get("offline", ())
        ]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        ids: list[str | None] = []
        for message in messages:
            node = message.metadata.dst_node_id
            refused = node in self.script.get("refused", ())
            ids.append(None if refused else f"id-{node}")
            if not refused:
                set_message_id(message, f"id-{node}")
                self.sent[f"id-{node}"] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        due = [
            one for one in message_ids if self.script["answers"].get(int(one[3:]), 99) <= self.looks
        ]
        return [Message(RecordDict(), reply_to=self.sent[one]) for one in due]

    def look_away(self) -> None:
        self.looks += 1
        assert self.looks < 9, "waits for a node that will not answer"


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with server_identity(1):
        yield


def answers(link: Link, timeout: float | None = None) -> dict[int, Message | ClientError]:
    grid = DeployedGrid(cast("Grid", link), pause=link.look_away, clock=lambda: float(link.looks))
    requests = {node: Message(RecordDict(), node, "train") for node in NODES}
    return dict(exchange(grid, requests, timeout=timeout))


def test_replies_are_pulled_until_all_are_there() -> None:
    found = answers(Link(answers={11: 0, 12: 3}))
    assert all(isinstance(answer, Message) for answer in found.values())


def test_a_restarted_node_fails_and_the_others_answer() -> None:
    found = answers(Link(answers={11: 4}, restarts={12: 2}))
    assert isinstance(found[11], Message)
    assert found[12] == ClientError(
        "its SuperNode was restarted during the request", NODE_RESTARTED
    )


def test_a_reply_from_before_the_restart_counts() -> None:
    found = answers(Link(answers={11: 2, 12: 2}, restarts={12: 2}))
    assert all(isinstance(answer, Message) for answer in found.values())


def test_a_node_that_is_offline_for_a_while_is_the_superlinks_to_judge() -> None:
    found = answers(Link(answers={11: 3, 12: 3}, offline=(1, 2)))
    assert all(isinstance(answer, Message) for answer in found.values())


def test_the_timeout_ends_the_wait() -> None:
    link = Link(answers={11: 0})
    assert answers(link, timeout=3.0)[12] == NO_REPLY
    assert link.looks == 3


def test_a_message_that_was_not_sent_has_no_reply() -> None:
    assert answers(Link(answers={11: 0}, refused=(12,)))[12] == NO_REPLY


@pytest.mark.parametrize(("timeout", "looks"), [(9.0, 3), (2.0, 2)])
def test_a_helper_that_is_offline_gets_time_to_come_back(timeout: float, looks: int) -> None:
    link = Link(answers={}, offline=(0, 1, 2))
    grid = DeployedGrid(cast("Grid", link), pause=link.look_away, clock=lambda: float(link.looks))
    assert isinstance(grid, PatientGrid)
    grid.wait_until_online([12], timeout=timeout)
    assert link.looks == looks


def test_a_helper_is_asked_again_when_it_is_back() -> None:
    """The second attempt waits; the first was answered at once, by the SuperLink."""

    class Back(Link):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for one in message_ids:
                request = self.sent[one]
                if self.looks < 2:
                    yield Message(Error(5, "Node Unavailable"), reply_to=request)
                else:
                    reply = HelloReply(run_id="run", helper=1, public_key=b"key")
                    yield make_reply(reply, request)

    link = Back(offline=(0, 1))
    grid = DeployedGrid(cast("Grid", link), pause=link.look_away, clock=lambda: float(link.looks))
    hello = Hello(run_id="run", params="", min_clients=2)
    found = QueryChannel(grid, {1: 12}, timeout=9.0, retries=1).query_with_retries(
        HELLO, {1: hello}, HelloReply
    )
    assert [number for number, _ in found] == [1]
