"""The ClientApp of a SuperNode: one client, or one helper, with its ledger on the node's disk."""

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsim.core.plugin_errors import contained_exits, describe_error
from fedsim.deployment.errors import DeploymentError
from fedsim.deployment.ledgers import LEDGER_TYPE, empty_ledger_reply, ledger_reply
from fedsim.deployment.node_state import client_ledger, state_directory
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.federation.nodes import make_node_app, num_helpers
from fedsim.federation.shards import TaskSource, client_app_from_source
from fedsim.protocol.errors import LEDGER_UNWRITABLE
from fedsim.protocol.roll_call import PARTITION
from fedsim.simulation.virtual_grid import failure

logger = logging.getLogger("flwr")

EXPERIMENT_FILE = "experiment.yaml"


class NodeClient(ClientApp):
    """The client or helper of a SuperNode, selected by its `partition-id`.

    Args:
        directory: contains `experiment.yaml` and its plug-in files.

    Guarantee: a round is charged in the node's ledger, on disk, before training starts. The charge
    remains if the SuperNode or the run fails.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; an error is answered in one line.

        Args:
            message: the server's request.
            context: of Flower, with the node's configuration.
        """
        try:
            with contained_exits():
                reply = self._answer(message, context)
            if reply.has_error() and reply.error.code == LEDGER_UNWRITABLE:
                # On a node of its own, that is the failure of this client, not of the run.
                return failure(message, reply.error.reason or "")
            return reply
        except Exception as error:
            logger.exception("this client failed")
            return failure(message, describe_error(error))

    def _answer(self, message: Message, context: Context) -> Message:
        loaded = load_experiment(self._directory / EXPERIMENT_FILE)
        client = _node_number(loaded, context)
        if client >= loaded.experiment.data.partition.num_clients:
            return _helper(loaded, message, context)
        state = state_directory(context.node_config)
        ledger = client_ledger(state, loaded.experiment, client)
        if message.metadata.message_type == LEDGER_TYPE:
            return ledger_reply(ledger, message)
        source = TaskSource(loaded.experiment.model_dump_json(), loaded.base, ledger)
        return client_app_from_source(source)(message, context)


def _helper(loaded: LoadedExperiment, message: Message, context: Context) -> Message:
    """Answer as a helper: it has no data, no model and no ledger."""
    if message.metadata.message_type == LEDGER_TYPE:
        return empty_ledger_reply(message)
    return make_node_app(ClientApp(), loaded.experiment, loaded.base)(message, context)


def _node_number(loaded: LoadedExperiment, context: Context) -> int:
    """Return the number of this node; clients come first, then helpers.

    Raises:
        DeploymentError: the node's configuration has no number, or one that the experiment lacks.
    """
    number = context.node_config.get(PARTITION)
    clients = loaded.experiment.data.partition.num_clients
    helpers = num_helpers(loaded.experiment)
    if not isinstance(number, int) or not 0 <= number < clients + helpers:
        parties = f"{clients} clients" + (f" and {helpers} helpers" if helpers else "")
        raise DeploymentError(
            f"this SuperNode needs --node-config 'partition-id=K' with K from 0 to "
            f"{clients + helpers - 1} ({loaded.experiment.name!r} has {parties}), got {number!r}"
        )
    return number
