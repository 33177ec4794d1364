"""The ClientApp of a SuperNode: its ledger is on the node's disk, with a copy at the server.

A ledger is public: it contains mechanisms and no data. The report and `fedsim verify` read the
server's copy. The original stays on the node, and is the one that counts.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError
from fedsim.clients.account import Accounts
from fedsim.clients.app import BatchClientApp
from fedsim.clients.faults import PUBLIC_ERRORS
from fedsim.clients.task import ClientTask
from fedsim.core.errors import FedsimError
from fedsim.core.plugin_errors import contained_exits, describe_error
from fedsim.experiment import (
    ExperimentWithClients,
    LoadedExperiment,
    load_experiment,
    read_settings,
)
from fedsim.federation.apps import helper_app, num_helpers
from fedsim.federation.nodes import TaskSource
from fedsim.federation.secure_setup import HELPER_KEY, identity_of_client
from fedsim.protocol.errors import COUPLED_ROWS, LEDGER_UNWRITABLE
from fedsim.protocol.node_registration import PARTITION
from fedsim.protocol.traffic import ClientError, exchange
from fedsim.simulation.engine import failure
from fedsim.tools.deployment.data_ledger import data_directory
from fedsim.tools.deployment.node_state import (
    NodeJournal,
    client_ledger,
    record_release,
    record_without_privacy,
    state_directory,
)
from fedsim.tools.deployment.policy import policy_of_node
from fedsim.tools.deployment.policy_rules import (
    PolicyRefusalError,
    check_experiment,
    check_plan,
    check_round,
)
from fedsim.tools.deployment.private_files import DeploymentError

logger = logging.getLogger("flwr")
copies_logger = logging.getLogger(__name__)

EXPERIMENT_FILE = "experiment.yaml"
LEDGER = "ledger"
LEDGER_TYPE = f"{MessageType.QUERY}.{LEDGER}"
_RECORDS = "records"


def ledger_reply(ledger: Path | None, request: Message) -> Message:
    """Return the reply that contains all records of a node's ledger; a helper has none."""
    lines = [] if ledger is None else ledger.read_text().splitlines(keepends=True)
    return Message(RecordDict({LEDGER: ConfigRecord({_RECORDS: lines})}), reply_to=request)


def collect_ledgers(grid: Grid, ledger: Path, *, timeout: float) -> None:
    """Update the server's copy of the ledgers; a node is logged that fails or contradicts it.

    Charges that are in the copy stay there.
    """
    journal = FileJournal(ledger)
    requests = {n: Message(RecordDict(), n, LEDGER_TYPE) for n in sorted(grid.get_node_ids())}
    for node, answer in exchange(grid, requests, timeout=timeout):
        try:
            for charge in _charges(answer):
                if all(known.hash != charge.hash for known in journal.history(charge.client)):
                    journal.append(charge)
        except JournalError as error:
            copies_logger.warning("node %d: its ledger was not taken: %s", node, error)


def _charges(answer: Message | ClientError) -> Iterable[Charge]:
    if isinstance(answer, ClientError):
        raise JournalError(answer.reason)
    lines = answer.content.config_records.get(LEDGER, {}).get(_RECORDS)
    if not isinstance(lines, list):
        raise JournalError("the reply has no records")
    return [
        Charge.from_line(str(line), where=f"record {number}")
        for number, line in enumerate(lines, start=1)
    ]


class NodeClient(ClientApp):
    """The Flower app of a SuperNode, which is the client or the helper of its `partition-id`.

    `directory` has `experiment.yaml` and its plug-in files.

    Guarantee: before training starts, a round is charged on disk in two ledgers: that of the node's
    data and that of the client. The charge remains if the SuperNode or the run fails. A request
    that the node's policy forbids is refused and not charged.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; an error gets one line that reveals nothing about the data."""
        try:
            with contained_exits():
                reply = self._answer(message, context)
            if reply.has_error() and reply.error.code in (LEDGER_UNWRITABLE, COUPLED_ROWS):
                # On a node of its own, that is the failure of this client, not of the run.
                return failure(message, reply.error.reason or "")
            return reply
        except PolicyRefusalError as error:
            logger.warning("%s", error)
            return failure(message, str(error))
        except Exception as error:
            logger.exception("this client failed")
            return failure(message, _public_text(error))

    def _answer(self, message: Message, context: Context) -> Message:
        path = self._directory / EXPERIMENT_FILE
        settings = read_settings(path)
        asked = LoadedExperiment(settings, path, self._directory.absolute())
        client = _node_number(settings, context)
        if client >= settings.num_clients:
            return _helper(asked, settings, message, context)
        state = state_directory(context.node_config)
        policy = policy_of_node(context.node_config, state)
        check_experiment(policy, asked)  # first: a refused experiment reads, keeps and runs nothing
        loaded = load_experiment(path)
        check_round(loaded.experiment, message)
        ledger = client_ledger(state, loaded.experiment, client)
        if message.metadata.message_type == LEDGER_TYPE:
            return ledger_reply(ledger, message)

        def guarded_task(client: int) -> ClientTask:
            experiment = loaded.experiment
            task = TaskSource(experiment.model_dump_json(), loaded.base, ledger)(client)
            if task.secure is not None:  # with the lasting key that the node's configuration names
                settings, own = task.secure.settings, context.node_config
                identity_of = partial(
                    identity_of_client, settings, base=loaded.base, node_config=own
                )
                task = replace(task, secure=replace(task.secure, identity_of=identity_of))
            data = data_directory(state, policy.data_name, loaded)
            own = task.accounts.journal
            if task.privacy is None or own is None or experiment.privacy is None:
                record_without_privacy(data, experiment, client)
                return task
            trust = experiment.privacy.trust.name
            check_plan(policy, task.privacy, trust=trust, digest=task.run.plan_digest)
            journal = NodeJournal(own, state, data, policy, task.privacy, experiment)
            return replace(task, accounts=Accounts(journal))

        return BatchClientApp(guarded_task)(message, context)


def _public_text(error: Exception) -> str:
    """Return the text of an error for the server, without what it may quote of the data."""
    if isinstance(error, (DeploymentError, *PUBLIC_ERRORS)):
        return describe_error(error)
    name = type(error).__name__ if isinstance(error, FedsimError) else "Exception"
    return f"{name}: this node cannot answer; its own log says why"


def _helper(
    asked: LoadedExperiment, settings: ExperimentWithClients, message: Message, context: Context
) -> Message:
    """Answer as a helper; no file that the experiment names is read, as the server sent it."""
    secure = settings.secure_aggregation
    if secure and secure.keys.helper_files and context.node_config.get(HELPER_KEY) is None:
        raise DeploymentError(
            "secure_aggregation.keys.helper_files is for simulations: this helper's SuperNode "
            f"needs --node-config '{HELPER_KEY}=\"/path\"', or the experiment no helper_files"
        )
    if message.metadata.message_type == LEDGER_TYPE:
        return ledger_reply(None, message)
    record = partial(record_release, state_directory(context.node_config))
    return helper_app(settings, asked.base, record)(message, context)


def _node_number(experiment: ExperimentWithClients, context: Context) -> int:
    """Return the number of this node, where clients are numbered first, then helpers."""
    number = context.node_config.get(PARTITION)
    clients, helpers = experiment.num_clients, num_helpers(experiment)
    if not isinstance(number, int) or not 0 <= number < clients + helpers:
        parties = f"{clients} clients" + (f" and {helpers} helpers" if helpers else "")
        raise DeploymentError(
            f"this SuperNode needs --node-config 'partition-id=K' with K from 0 to "
            f"{clients + helpers - 1} ({experiment.name!r} has {parties}), got {number!r}"
        )
    return number
