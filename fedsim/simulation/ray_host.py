"""One worker process of the Ray engine: some clients with their data and their state.

Everything here runs inside the actor; nothing here starts or stops one.
"""

import logging
import platform
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flwr
import torch
from flwr.app import Context, Message, RecordDict

import fedsim
from fedsim.simulation.flower_internals import with_content
from fedsim.simulation.memory import keep_freed_memory
from fedsim.simulation.ray_journal import RemoteJournal, ask
from fedsim.simulation.sharding import Shard
from fedsim.simulation.virtual_grid import Record, failure, own_copy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parcel:
    """A message on its way to a worker.

    Attributes:
        envelope: the message without its records.
        records: what it carries, by name; None stands for a shared record.
        shared: references to the records that messages of one round have in common, by name.
    """

    envelope: Message
    records: Mapping[str, Record | None]
    shared: Mapping[str, Any]

    @property
    def node(self) -> int:
        """The node that it is addressed to."""
        return self.envelope.metadata.dst_node_id


@dataclass(frozen=True)
class Answer:
    """A client's reply, and its state after it: what a replacement would start from."""

    reply: Message
    state: RecordDict


class ClientHost:
    """Answers the messages of its clients, one after the other, on one thread.

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
        self._app = shard(None if keeper is None else RemoteJournal(keeper, ask))
        self._shared: dict[str, Record] = {}

    def versions(self) -> dict[str, str]:
        """Return what must be the same on every machine for the same result."""
        return versions()

    def answer(self, parcel: Parcel) -> Answer:
        """Run the ClientApp for one message.

        A client's context keeps what it wrote before it raised: for a privacy account that is the
        safe side.
        """
        message, context = self._open(parcel), self._contexts[parcel.node]
        try:
            reply = self._app(message, context)
        except Exception as error:  # noqa: BLE001  whatever a client raises is that client's failure
            logger.debug("node %d raised\n%s", parcel.node, traceback.format_exc())
            reply = failure(message, f"{type(error).__name__}: {error}")
        return Answer(reply, context.state)

    def _open(self, parcel: Parcel) -> Message:
        content = RecordDict()
        self._fetch(parcel.shared.values())
        for name, record in parcel.records.items():
            if record is None:
                record = self._shared[parcel.shared[name].hex()]
            content[name] = own_copy(record)
        return with_content(parcel.envelope, content)

    def _fetch(self, references: Any) -> None:
        """Read shared records once for all clients of this worker; keep those of one round."""
        wanted = {reference.hex(): reference for reference in references}
        if wanted.keys() <= self._shared.keys():
            return
        import ray

        self._shared = dict(zip(wanted, ray.get(list(wanted.values())), strict=True))


def versions() -> dict[str, str]:
    """Return the versions that results may depend on to the bit."""
    return {
        "fedsim": fedsim.__version__,
        "torch": torch.__version__,
        "flwr": getattr(flwr, "__version__", "unknown"),
        "machine": platform.machine(),
    }
