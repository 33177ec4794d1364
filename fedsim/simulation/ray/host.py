"""Worker process of the Ray engine: one actor with the data and state of some clients."""

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, Message, RecordDict

import fedsim
from fedsim.protocol.arrays import is_live, live_record
from fedsim.protocol.flower_internals import replace_content
from fedsim.simulation.engine import (
    FIRST_NODE,
    FlowerRecord,
    NodeContexts,
    ShardFactory,
    answer_requests,
    chunk_by_time,
    freeze_objects,
    keep_freed_memory,
    reply_of,
)
from fedsim.simulation.ray.journal import RemoteJournal, call_actor
from fedsim.simulation.ray.session import FastPickle

_CHUNK_SECONDS = 0.2  # least time per chunk of replies, which the server aggregates meanwhile


@dataclass(frozen=True)
class PackedRequest:
    """Message to a client, in the form in which it is sent to the client's worker.

    Attributes:
        envelope: the message without its records.
        records: the records of the message by name; None for a record that several messages share.
        shared: for each shared record, by name, the key under which the worker finds the record.
    """

    envelope: Message
    records: Mapping[str, FlowerRecord | None]
    shared: Mapping[str, str]

    @property
    def node(self) -> int:
        """Id of the node that receives the message."""
        return self.envelope.metadata.dst_node_id


@dataclass(frozen=True)
class PackedReply:
    """A client's reply, with the client's state after it; a new process resumes from this state.

    Attributes:
        envelope: the reply without the arrays in `live`.
        live: the arrays that Ray can move without a copy: for each record name, arrays by name.
            In a Flower record they would be copied and parsed.
        state: the client's state after the reply.
    """

    envelope: Message
    live: Mapping[str, Mapping[str, np.ndarray]]
    state: RecordDict

    @classmethod
    def pack(cls, reply: Message, state: RecordDict) -> Self:
        """Pack a client's reply, so that it can be sent to the server.

        Args:
            reply: the client's reply.
            state: the client's state after the reply.
        """
        if reply.has_error():
            return cls(reply, {}, state)
        live = {
            name: {key: array.numpy() for key, array in record.items()}
            for name, record in reply.content.items()
            if isinstance(record, ArrayRecord) and is_live(record)
        }
        rest = RecordDict({n: record for n, record in reply.content.items() if n not in live})
        return cls(replace_content(reply, rest), live, state)

    def unpack(self) -> Message:
        """Return the client's whole reply, as a Flower message that contains the arrays."""
        for name, values in self.live.items():
            self.envelope.content[name] = live_record(values)
        return self.envelope


@dataclass(frozen=True)
class ReplyChunk:
    """Some replies of a call to a worker, and the seconds that computing them took in total."""

    replies: tuple[PackedReply, ...]
    seconds: float


class ClientHost:
    """Ray actor of a worker, which answers the messages of its clients in one thread.

    Args:
        make_app: function that creates the ClientApp of the worker's clients.
        contexts: the last recorded contexts of these clients.
        journal_actor: the actor that writes the privacy ledger to disk; None without a ledger.
    """

    def __init__(
        self, make_app: ShardFactory, contexts: NodeContexts, journal_actor: Any | None
    ) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self._contexts = contexts
        journal = None
        if journal_actor is not None:
            clients = [node - FIRST_NODE for node in contexts]
            journal = RemoteJournal(journal_actor, call_actor, clients)
        self._app = make_app(journal)
        self._shared: dict[str, ArrayRecord] = {}
        freeze_objects()  # until the process ends

    def versions(self) -> dict[str, str]:
        """Return the software versions that must be equal on all machines for equal results."""
        return versions()

    def answer(
        self, packed: Sequence[PackedRequest], shared: Mapping[str, Any]
    ) -> Iterator[FastPickle]:
        """Call the ClientApp with messages of one type, each to a different client.

        An app that can answer several messages at once gets all of them. A client's context keeps
        what the client wrote before an exception, so no recorded charge is lost.

        Args:
            packed: the messages.
            shared: references to the records that messages share, by key.

        Yields:
            Chunks of replies (`ReplyChunk`) in the order of the messages.
        """
        self._fetch(shared)
        requests = [(self._unpack(request), self._contexts[request.node]) for request in packed]
        pending = iter(requests)

        def packed_reply(answer: Message | Exception) -> PackedReply:
            message, context = next(pending)
            return PackedReply.pack(reply_of(message, answer), context.state)

        groups = (map(packed_reply, group) for group in answer_requests(self._app, requests))
        for replies, seconds in chunk_by_time(groups, len(requests), chunk_seconds=_CHUNK_SECONDS):
            yield FastPickle(ReplyChunk(tuple(replies), seconds))

    def _unpack(self, request: PackedRequest) -> Message:
        records = {
            name: (self._shared[request.shared[name]] if record is None else record).copy()
            for name, record in request.records.items()
        }
        return replace_content(request.envelope, RecordDict(records))

    def _fetch(self, shared: Mapping[str, Any]) -> None:
        """Read shared records once per worker, and keep them until a call shares other records."""
        if shared.keys() <= self._shared.keys():
            return
        import ray

        records = ray.get(list(shared.values()))
        self._shared = {
            name: live_record({key: array.numpy() for key, array in record.items()})
            for name, record in zip(shared, records, strict=True)
        }


def versions() -> dict[str, str]:
    """Return the versions of software that may change the exact bits of results."""
    return {
        "fedsim": fedsim.__version__,
        "torch": torch.__version__,
        "flwr": getattr(flwr, "__version__", "unknown"),
        "machine": platform.machine(),
    }
