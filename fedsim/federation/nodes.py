"""The nodes of a federation: clients, and behind them the helpers of secure aggregation.

Node number `num_clients` is helper 1. A helper is code of the server's side; that it runs in the
same process as clients is part of the simulation.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsim.clients.app import partition_of
from fedsim.clients.batch_app import AnswerGroup, BatchClientApp, Request
from fedsim.experiment import Experiment
from fedsim.federation.helper_keys import identity_of_helper
from fedsim.secagg.identity import IdentityKey
from fedsim.server.secure.helper_app import make_helper_app


def num_helpers(experiment: Experiment) -> int:
    """Return how many nodes are helpers."""
    settings = experiment.secure_aggregation
    return 0 if settings is None else settings.helpers


def with_helpers(clients: ClientApp, experiment: Experiment, base: Path) -> ClientApp:
    """Return an app that is any node of the federation: a client, or a helper.

    Without helpers, it is the clients' app itself. Relative paths of the experiment start at
    `base`.
    """
    settings = experiment.secure_aggregation
    if settings is None or not settings.helpers:
        return clients
    first = experiment.data.partition.num_clients

    def number_of(context: Context) -> int:
        return partition_of(context) - first + 1

    def identity_of(context: Context) -> IdentityKey | None:
        return identity_of_helper(
            settings, number_of(context), base=base, node_config=context.node_config
        )

    helper = make_helper_app(settings, number_of, identity_of)
    kind = _ManyNodes if isinstance(clients, BatchClientApp) else _Nodes
    return kind(clients, helper, first)


class _Nodes(ClientApp):
    def __init__(self, clients: ClientApp, helper: ClientApp, num_clients: int) -> None:
        super().__init__()
        self._clients, self._helper = clients, helper
        self._num_clients = num_clients

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message as the node that the context names."""
        is_client = partition_of(context) < self._num_clients
        return (self._clients if is_client else self._helper)(message, context)


class _ManyNodes(_Nodes):
    """As `_Nodes`, where clients can be asked together; helpers are never asked to train."""

    _clients: BatchClientApp

    @property
    def group_size(self) -> int:
        """The most requests in one group."""
        return self._clients.group_size

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the clients' answers, in the order of the requests."""
        return self._clients.answer_batch(requests)
