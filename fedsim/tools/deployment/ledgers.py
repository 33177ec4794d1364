"""Collection of the clients' ledgers by the server of a deployment.

A ledger is public: it contains mechanisms and no data. The report and `fedsim verify` read the
server's copy. The original stays on the node and decides.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError
from fedsim.protocol.channel import ClientError, exchange

logger = logging.getLogger(__name__)

LEDGER = "ledger"
LEDGER_TYPE = f"{MessageType.QUERY}.{LEDGER}"
_RECORDS = "records"


def ledger_reply(ledger: Path, request: Message) -> Message:
    """Return the reply with every record of a node's ledger.

    Args:
        ledger: the node's ledger file.
        request: the server's message.
    """
    lines = ledger.read_text().splitlines(keepends=True)
    return Message(RecordDict({LEDGER: ConfigRecord({_RECORDS: lines})}), reply_to=request)


def empty_ledger_reply(request: Message) -> Message:
    """Return the reply of a node without a ledger."""
    return Message(RecordDict({LEDGER: ConfigRecord({_RECORDS: []})}), reply_to=request)


def collect_ledgers(grid: Grid, ledger: Path, *, timeout: float) -> None:
    """Request every node's ledger and complete the server's copy.

    A node is logged and left out if it does not answer or its records do not continue the server's.
    The copy then keeps the charges of that node that it had before.

    Args:
        grid: the connected nodes.
        ledger: file of the server's copy.
        timeout: seconds to wait for all replies.
    """
    journal = FileJournal(ledger)
    requests = {n: Message(RecordDict(), n, LEDGER_TYPE) for n in sorted(grid.get_node_ids())}
    for node, answer in exchange(grid, requests, timeout=timeout):
        try:
            for charge in _charges(answer):
                if all(known.hash != charge.hash for known in journal.history(charge.client)):
                    journal.append(charge)
        except JournalError as error:
            logger.warning("node %d: its ledger was not taken: %s", node, error)


def _charges(answer: Message | ClientError) -> Iterable[Charge]:
    if isinstance(answer, ClientError):
        raise JournalError(answer.reason)
    record = answer.content.config_records.get(LEDGER)
    lines = None if record is None else record.get(_RECORDS)
    if not isinstance(lines, list):
        raise JournalError("the reply has no records")
    return [
        Charge.from_line(str(line), where=f"record {number}")
        for number, line in enumerate(lines, start=1)
    ]
