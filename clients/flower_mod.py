"""Flower mod that keeps a privacy ledger for each client of any Flower app.

Example::

    from fedsim.accountant import Gaussian, PoissonSampled
    from fedsim.clients.flower_mod import PrivacyLedgerMod, declare_release

    @app.train(mods=[PrivacyLedgerMod(delta=1e-5)])
    def train(message, context):
        ...  # DP-SGD of 20 steps with any library
        declare_release(context, PoissonSampled(0.01, Gaussian(1.1)), count=20)
        return reply

The reply then has a `ConfigRecord` named "privacy", with the client's ledger and its ε over all
rounds. The mod does not import torch and does not read arrays.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict

from fedsim.accountant import Event, NonPrivate, PrivacyLedger, make_accountant
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.events import Adjacency
from fedsim.accountant.ledger.journal import Charge, FileJournal, total_of
from fedsim.protocol.arrays import record_of
from fedsim.protocol.node_registration import PARTITION

logger = logging.getLogger(__name__)

RECORD = "privacy"
"""Name of the `ConfigRecord` with a client's ledger in a train reply."""

_STATE = "privacy-ledger"
_DECLARED = "privacy-declared"

Releases = Iterable[tuple[Event, int]]
ReleasesOf = Callable[[Message, Context], Releases]


def declare_release(context: Context, event: Event, count: int = 1) -> None:
    """Declare the releases of the current round; the app's training function calls this.

    Args:
        context: the `Context` of the training function.
        event: the privacy event of each release, such as a Poisson-sampled Gaussian.
        count: number of releases, such as the number of DP-SGD steps.

    Raises:
        ValueError: `count` is negative or not a whole number, or `event` is not a privacy event.
    """
    ledger = _stored(context.state, _DECLARED).record(event, count)
    _store(context.state, _DECLARED, ledger)


class PrivacyLedgerMod:
    """Flower mod that keeps a client's privacy ledger and reports ε in every train reply.

    The ledger is kept in `Context.state`.

    Guarantee: suppose that the declared events of each round describe everything that the reply
    reveals about the client's data. Suppose also that noise is fresh in each round, and that no
    parameter depends on data. Then all train replies of the client that passed the mod, taken
    together, are (epsilon, delta)-DP under `adjacency`. A declaration is in the state, and with
    `journal` on disk, before its reply leaves. A round without a declaration is charged as a
    release without a guarantee, so ε is infinite from then on.

    The guarantee does not cover four things. The mod cannot see whether training did what it
    declares. It cannot check how other libraries compute noise. Metrics of a train reply outside
    `public_metrics` are not covered; the reply's record "privacy" lists them as `not-covered`.
    Replies to other messages, such as scores on private data, are not covered; the record counts
    those that passed the mod as `other-replies`. Use the mod in `@app.train(mods=[...])`; as a mod
    of the whole app it also sees other messages.

    Args:
        delta: δ of the reported ε, in (0, 1).
        releases: the releases of every round, if they are known before training. Give pairs (event,
            count), or a function of (message, context) that returns such pairs. They are charged
            before training. If None, the training function must call `declare_release`.
        accountant: name of the accountant: "pld", "rdp" or "moments".
        adjacency: the pairs of data sets that ε compares.
        public_metrics: names of metrics in train replies that reveal nothing private.
        journal: path of an append-only ledger file, shared by the clients of a machine. It restores
            a client whose state was lost, and `fedsim totals` reads it. If None, the state is the
            only copy; Flower keeps it for one run, and a restarted SuperNode loses it.
        metric: name of a metric that also reports ε. Strategies average metrics over clients, and a
            mean of ε is not a guarantee; for a guarantee, read the records.

    Raises:
        ValueError: δ is not in (0, 1), or the accountant or adjacency is unknown.
    """

    def __init__(
        self,
        *,
        delta: float,
        releases: Sequence[tuple[Event, int]]
        | Callable[[Message, Context], Releases]
        | None = None,
        accountant: AccountantName = "pld",
        adjacency: Adjacency = "zero_out",
        public_metrics: Sequence[str] = ("num-examples",),
        journal: Path | str | None = None,
        metric: str | None = None,
    ) -> None:
        make_accountant(accountant, adjacency=adjacency).get_epsilon(delta)  # refuses wrong values
        self._delta, self._releases = delta, releases
        self._accountant: AccountantName = accountant
        self._adjacency: Adjacency = adjacency
        self._public, self._metric = frozenset(public_metrics), metric
        self._journal = None if journal is None else FileJournal(Path(journal))

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Pass a message on to the app, charge its releases and return the reply.

        Args:
            message: the message to the client.
            context: the client's context, whose state holds the ledger.
            call_next: the next mod, or the app.
        """
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            state = _fields(context.state)
            context.state[_STATE] = ConfigRecord(
                {**state, "other-replies": int(state.get("other-replies", 0)) + 1}
            )
            return call_next(message, context)
        _store(context.state, _DECLARED, PrivacyLedger())
        if self._releases is not None:
            self._charge(message, context, PrivacyLedger.of(self._known(message, context)))
        try:
            reply = call_next(message, context)
        except BaseException:
            self._charge(message, context, _stored(context.state, _DECLARED))
            raise
        declared = _stored(context.state, _DECLARED)
        if self._releases is None and not declared.entries:
            logger.warning(
                "client %d declared no release in this round, so its reply is charged as one "
                "without a guarantee: call declare_release in its training function, or pass "
                "releases= to the mod",
                _client(context),
            )
            declared.record(NonPrivate())
        self._charge(message, context, declared)
        if reply.has_content():
            self._report(reply.content, context)
        return reply

    def _known(self, message: Message, context: Context) -> Releases:
        known = self._releases
        return known(message, context) if callable(known) else known or ()

    def _charge(self, message: Message, context: Context, ledger: PrivacyLedger) -> None:
        """Add releases to the client's ledger, on disk first and then in its state."""
        _store(context.state, _DECLARED, PrivacyLedger())
        if not ledger.entries:
            return
        state, total = _fields(context.state), self._total(context)
        if self._journal is not None:
            self._journal.append(_journal_record(self._journal, message, context, ledger))
        charges = int(state.get("charges", 0)) + 1
        context.state[_STATE] = ConfigRecord(
            {**state, "ledger": total.merge(ledger).to_text(), "charges": charges}
        )

    def _total(self, context: Context) -> PrivacyLedger:
        """Return the client's whole ledger, from the journal where there is one."""
        if self._journal is None:
            return _stored(context.state, _STATE)
        return total_of(self._journal.history(_client(context)))

    def _report(self, content: RecordDict, context: Context) -> None:
        ledger, state = self._total(context), _fields(context.state)
        account = ledger.compose_into(make_accountant(self._accountant, adjacency=self._adjacency))
        epsilon = account.get_epsilon(self._delta)
        names = [name for record in content.metric_records.values() for name in record]
        content[RECORD] = ConfigRecord(
            {
                "client": _client(context),
                "epsilon": epsilon,
                "delta": self._delta,
                "accountant": self._accountant,
                "adjacency": self._adjacency,
                "ledger": ledger.to_text(),
                "not-covered": [name for name in names if name not in self._public],
                "other-replies": int(state.get("other-replies", 0)),
            }
        )
        if self._metric is not None:
            records = list(content.metric_records.values())
            if records:
                records[0][self._metric] = epsilon
                name = next(iter(content.metric_records))
                content[name] = records[0]
            else:
                content["metrics"] = MetricRecord({self._metric: epsilon})


def client_ledgers(replies: Iterable[Message]) -> dict[str, Any]:
    """Return the ledgers in clients' train replies, in the format that `fedsim totals` reads.

    Args:
        replies: train replies of clients, each with the "privacy" record of the mod.

    Raises:
        ValueError: a reply has no such record, or two replies are from the same client.
    """
    rows: dict[int, Mapping[str, Any]] = {}
    for reply in replies:
        record = record_of(reply.content, RECORD, ConfigRecord) if reply.has_content() else None
        if record is None:
            raise ValueError(
                f"the reply of node {reply.metadata.src_node_id} has no record {RECORD!r}: its app "
                "has no PrivacyLedgerMod, or the request failed"
            )
        client, epsilon = int(str(record["client"])), float(str(record["epsilon"]))
        if client in rows:
            raise ValueError(f"two replies are of client {client}; pass the replies of one round")
        rows[client] = {
            "client": client,
            "epsilon": None if math.isinf(epsilon) else epsilon,
            "delta": record["delta"],
            "ledger": json.loads(str(record["ledger"])),
        }
    return {"clients": [rows[client] for client in sorted(rows)]}


def _journal_record(
    journal: FileJournal, message: Message, context: Context, ledger: PrivacyLedger
) -> Charge:
    client = _client(context)
    config = next(iter(message.content.config_records.values()), {})
    given = config.get("server-round")
    round_number = given if isinstance(given, int) else len(journal.history(client)) + 1
    steps = sum(count for _, count in ledger.entries)
    return Charge(client, round_number, "", steps, ledger, journal.head(client))


def _client(context: Context) -> int:
    number = context.node_config.get(PARTITION, context.node_id)
    return number if isinstance(number, int) else context.node_id


def _fields(state: RecordDict) -> dict[str, Any]:
    record = record_of(state, _STATE, ConfigRecord)
    return {} if record is None else dict(record)


def _stored(state: RecordDict, name: str) -> PrivacyLedger:
    record = record_of(state, name, ConfigRecord)
    text = None if record is None else record.get("ledger")
    return PrivacyLedger() if text is None else PrivacyLedger.from_text(str(text))


def _store(state: RecordDict, name: str, ledger: PrivacyLedger) -> None:
    state[name] = ConfigRecord({"ledger": ledger.to_text()})
