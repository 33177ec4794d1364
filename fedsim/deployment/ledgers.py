"""How the server of a deployment learns the clients' ledgers, which stay on their nodes.

A ledger is public: it holds mechanisms and no data. The server's copy is what the report and
`fedsim verify` read; the original is on the node, and decides.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError

logger = logging.getLogger(__name__)

LEDGER = "ledger"
LEDGER_TYPE = f"{MessageType.QUERY}.{LEDGER}"
_RECORDS = "records"


def ledger_reply(ledger: Path, request: Message) -> Message:
    """Answer with every record of a node's ledger."""
    lines = ledger.read_text().splitlines(keepends=True)
    return Message(RecordDict({LEDGER: ConfigRecord({_RECORDS: lines})}), reply_to=request)


def empty_ledger_reply(request: Message) -> Message:
    """Answer as a node that keeps no ledger."""
    return Message(RecordDict({LEDGER: ConfigRecord({_RECORDS: []})}), reply_to=request)


def collect_ledgers(grid: Grid, ledger: Path, *, timeout: float) -> None:
    """Ask every node for its ledger and complete the server's copy.

    A node that does not answer, or whose records do not continue what the server has, is logged and
    left out: its spend then stands in the copy as far as it was known before.
    """
    journal = FileJournal(ledger)
    asked = [Message(RecordDict(), node, LEDGER_TYPE) for node in sorted(grid.get_node_ids())]
    for reply in grid.send_and_receive(asked, timeout=timeout):
        node = reply.metadata.src_node_id
        try:
            for charge in _charges(reply):
                if all(known.hash != charge.hash for known in journal.history(charge.client)):
                    journal.append(charge)
        except JournalError as error:
            logger.warning("node %d: its ledger was not taken: %s", node, error)


def _charges(reply: Message) -> Iterable[Charge]:
    if reply.has_error():
        raise JournalError(reply.error.reason or "no reason given")
    record = reply.content.config_records.get(LEDGER)
    lines = None if record is None else record.get(_RECORDS)
    if not isinstance(lines, list):
        raise JournalError("the reply has no records")
    return [
        Charge.from_line(str(line), where=f"record {number}")
        for number, line in enumerate(lines, start=1)
    ]
