"""Calls to a worker: whole blocks, as many as a second of work, and alone after a death."""

from typing import Any

import pytest
from flwr.app import Message, MessageType, RecordDict

pytest.importorskip("ray", reason="needs the extra `ray`")

from fedsim.protocol.flower_internals import server_identity
from fedsim.simulation.engine import NodeContexts
from fedsim.simulation.ray.host import PackedRequest
from fedsim.simulation.ray.pool import Worker, _Job


def make_worker(*blocks: tuple[int, ...], per_call: int = 1) -> Worker:
    """Return a worker with the requests of some blocks in its queue."""
    none = NodeContexts((), num_nodes=0)
    worker = Worker(0, none, lambda contexts: None, group={MessageType.TRAIN: per_call})
    with server_identity(1):
        for block in blocks:
            for client in block:
                message = Message(RecordDict(), 1000 + client, MessageType.TRAIN)
                worker.queue.append(_Job(PackedRequest(message, {}, {}), block[0]))
    return worker


def call(worker: Worker) -> Any:
    """Take the jobs of the next call."""
    return worker._next_jobs()


def clients(jobs: Any) -> list[int]:
    return [job.request.node - 1000 for job in jobs]


def calls(worker: Worker) -> list[list[int]]:
    found = []
    while worker.queue:
        found.append(clients(call(worker)))
    return found


def test_a_block_is_never_cut() -> None:
    assert calls(make_worker((0, 1, 2), (3, 4), (5,))) == [[0, 1, 2], [3, 4], [5]]
    assert calls(make_worker((0, 1, 2), (3, 4), (5,), per_call=4)) == [[0, 1, 2, 3, 4], [5]]
    assert calls(make_worker((0,), (1,), (2,), per_call=2)) == [[0, 1], [2]]


def test_blocks_of_a_dead_worker_are_sent_alone_and_then_their_clients() -> None:
    worker = make_worker((0, 1), (2, 3), (4, 5), per_call=4)
    worker.requeue(call(worker))
    first = call(worker)
    assert clients(first) == [0, 1]
    worker.requeue(first)
    assert calls(worker) == [[0], [1], [2, 3], [4, 5]]
