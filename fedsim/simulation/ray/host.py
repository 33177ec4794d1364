"""One worker process of the Ray engine: some clients with their data and their state.

Everything here runs inside the actor; nothing here starts or stops one.
"""

import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

import fedsim
from fedsim.clients.app import partition_of
from fedsim.protocol.live_arrays import is_live, live_record
from fedsim.protocol.records import record_dict
from fedsim.simulation.answers import answers_of, in_parts
from fedsim.simulation.flower_internals import with_content
from fedsim.simulation.memory import freeze_objects, keep_freed_memory
from fedsim.simulation.ray.fast_pickle import Packed
from fedsim.simulation.ray.journal import RemoteJournal, ask
from fedsim.simulation.shardable_app import Shard
from fedsim.simulation.virtual_grid import Record, failure

logger = logging.getLogger(__name__)

_PART = 0.2  # seconds between answers on their way, so that aggregation goes on beside training


@dataclass(frozen=True)
class Parcel:
    """A message on its way to a worker.

    Attributes:
        envelope: the message without its records.
        records: what it carries, by name; None stands for a shared record.
        shared: keys of the records that messages of one round have in common, by name.
    """

    envelope: Message
    records: Mapping[str, Record | None]
    shared: Mapping[str, str]

    @property
    def node(self) -> int:
        """The node that it is addressed to."""
        return self.envelope.metadata.dst_node_id


@dataclass(frozen=True)
class PackedReply:
    """A client's reply, and its state after it: what a replacement would start from.

    Attributes:
        envelope: the reply without the arrays of `live`.
        live: numbers that never leave one process otherwise, by record and name. Ray moves them as
            they are; as a record they would be copied and parsed.
        state: the client's state.
    """

    envelope: Message
    live: Mapping[str, Mapping[str, np.ndarray]]
    state: RecordDict

    @classmethod
    def of(cls, reply: Message, state: RecordDict) -> Self:
        """Return the answer that carries a reply."""
        if reply.has_error():
            return cls(reply, {}, state)
        live = {
            name: {key: array.numpy() for key, array in record.items()}
            for name, record in reply.content.items()
            if isinstance(record, ArrayRecord) and is_live(record)
        }
        rest = record_dict({n: record for n, record in reply.content.items() if n not in live})
        return cls(with_content(reply, rest), live, state)

    def reply(self) -> Message:
        """Return the reply."""
        for name, values in self.live.items():
            self.envelope.content[name] = live_record(values)
        return self.envelope


@dataclass(frozen=True)
class Answers:
    """A part of what comes of a call: answers to its next messages, and the seconds they took."""

    answers: tuple[PackedReply, ...]
    seconds: float


class ClientHost:
    """Answers the messages of its clients on one thread.

    Args:
        shard: makes the ClientApp of the clients.
        contexts: the last recorded context of each client, by node.
        keeper: the actor that keeps the durable ledger, if there is one.
    """

    def __init__(self, shard: Shard, contexts: Sequence[Context], keeper: Any | None) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self._contexts = {context.node_id: context for context in contexts}
        clients = [partition_of(context) for context in contexts]
        self._app = shard(None if keeper is None else RemoteJournal(keeper, ask, clients))
        self._shared: dict[str, ArrayRecord] = {}
        freeze_objects()  # for the rest of the process' life

    def versions(self) -> dict[str, str]:
        """Return what must be the same on every machine for the same result."""
        return versions()

    def answer(self, parcels: Sequence[Parcel], shared: Mapping[str, Any]) -> Iterator[Packed]:
        """Run the ClientApp for messages of one kind, to different clients.

        An app that can answer many at once gets them at once. A client's context keeps what it
        wrote before it raised: for a privacy account that is the safe side.

        Args:
            parcels: the messages.
            shared: references to the records that they have in common, by key.

        Yields:
            Answers in the order of the messages, packed for the way back, as often as is worth it.
        """
        self._fetch(shared)
        requests = [(self._open(parcel), self._contexts[parcel.node]) for parcel in parcels]
        asked = iter(requests)
        groups = (
            [self._answer(*next(asked), answer) for answer in together]
            for together in answers_of(self._app, requests)
        )
        for found, seconds in in_parts(groups, len(requests), every=_PART):
            yield Packed(Answers(tuple(found), seconds))

    def _answer(
        self, message: Message, context: Context, answer: Message | Exception
    ) -> PackedReply:
        if isinstance(answer, Exception):
            logger.debug("node %d raised", context.node_id, exc_info=answer)
            answer = failure(message, f"{type(answer).__name__}: {answer}")
        return PackedReply.of(answer, context.state)

    def _open(self, parcel: Parcel) -> Message:
        records = {
            name: (self._shared[parcel.shared[name]] if record is None else record).copy()
            for name, record in parcel.records.items()
        }
        return with_content(parcel.envelope, record_dict(records))

    def _fetch(self, shared: Mapping[str, Any]) -> None:
        """Read shared records once for all clients of this worker; keep those of one round."""
        if shared.keys() <= self._shared.keys():
            return
        import ray

        records = ray.get(list(shared.values()))
        self._shared = {
            name: live_record({key: array.numpy() for key, array in record.items()})
            for name, record in zip(shared, records, strict=True)
        }


def versions() -> dict[str, str]:
    """Return the versions that results may depend on to the bit."""
    return {
        "fedsim": fedsim.__version__,
        "torch": torch.__version__,
        "flwr": getattr(flwr, "__version__", "unknown"),
        "machine": platform.machine(),
    }
