"""Each request gets one answer, whatever the grid yields."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.protocol.flower_internals import server_identity, set_message_id
from fedsim.protocol.traffic import NO_REPLY, ClientError, exchange

NODES = (11, 12, 13)


class Scripted:
    """A grid that yields what a function of the requests returns; it may set no ids."""

    def __init__(self, replies: Any, *, sets_ids: bool = True) -> None:
        self._replies, self._sets_ids = replies, sets_ids

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        sent = list(messages)
        for number, message in enumerate(sent if self._sets_ids else ()):
            set_message_id(message, f"id-{number}")
        yield from self._replies(sent)


def answers(replies: Any, *, sets_ids: bool = True) -> list[tuple[str, Any]]:
    with server_identity(1):
        requests = {f"key-{node}": Message(RecordDict(), node, "query.x") for node in NODES}
        grid = cast("Grid", Scripted(replies, sets_ids=sets_ids))
        return list(exchange(grid, requests, timeout=None))


def from_node(reply: Message, node: int) -> Message:
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


def replies_to(sent: Sequence[Message]) -> list[Message]:
    return [Message(RecordDict(), reply_to=message) for message in sent]


@pytest.mark.parametrize("sets_ids", [True, False])
def test_replies_come_on_arrival_and_the_silent_last(sets_ids: bool) -> None:
    found = answers(lambda sent: replies_to(sent)[:0:-1], sets_ids=sets_ids)
    assert [key for key, _ in found] == ["key-13", "key-12", "key-11"]
    assert [answer is NO_REPLY for _, answer in found] == [False, False, True]


def test_the_error_of_the_link_is_that_of_the_node_it_speaks_for() -> None:
    def dead(sent: Sequence[Message]) -> list[Message]:
        first, second, third = sent
        error = Message(Error(5, "Node Unavailable"), reply_to=second)
        return [*replies_to([first]), from_node(error, 1), *replies_to([third])]

    found = dict(answers(dead))
    assert found["key-12"] == ClientError("Node Unavailable", 5)
    assert [isinstance(found[f"key-{node}"], Message) for node in (11, 13)] == [True, True]


@pytest.mark.parametrize("sets_ids", [True, False])
def test_second_replies_and_strangers_are_left_out(logged: Any, sets_ids: bool) -> None:
    def noisy(sent: Sequence[Message]) -> list[Message]:
        stranger = from_node(Message(RecordDict(), reply_to=sent[0]), 77)
        return [stranger, *replies_to(sent), *replies_to(sent[:1])]

    found = answers(noisy, sets_ids=sets_ids)
    assert [key for key, _ in found] == ["key-11", "key-12", "key-13"]
    assert [reply.metadata.src_node_id for _, reply in found] == [11, 12, 13]
    assert "a reply of node 77 answers no request and is left out" in logged.text
    assert "a second reply of node 11 is left out" in logged.text


def test_a_reply_to_an_earlier_request_of_the_node_is_left_out() -> None:
    def late(sent: Sequence[Message]) -> list[Message]:
        (reply,) = replies_to(sent[:1])
        reply.metadata.__dict__["_reply_to_message_id"] = "of the round before"
        return [reply, *replies_to(sent[1:])]

    assert answers(late)[-1] == ("key-11", NO_REPLY)


def test_without_requests_nothing_is_sent() -> None:
    grid = cast("Grid", Scripted(lambda _: pytest.fail("was asked")))
    assert list(exchange(grid, {}, timeout=None)) == []
