"""The nodes of a federation: its clients, followed by the helpers of secure aggregation.

Node number `num_clients` is helper 1. A helper belongs to the server's side; only a simulation runs
it in one process with clients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsim.clients.app import AnswerGroup, BatchClientApp, Request, partition_of
from fedsim.clients.client_round import Answer
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.protocol.messages import TrainRequest

if TYPE_CHECKING:
    from fedsim.secagg.identity import IdentityKey
    from fedsim.server.secure.helper import Release


def num_helpers(experiment: Experiment) -> int:
    """Return the number of helpers."""
    settings = experiment.secure_aggregation
    return 0 if settings is None else settings.helpers


RecordRelease: TypeAlias = "Callable[[int, Release], None]"
"""(helper, release): records a sum that a helper is about to release."""


def make_node_app(
    clients: ClientApp,
    experiment: ExperimentWithClients,
    base: Path,
    record: RecordRelease = lambda helper, release: None,
) -> ClientApp:
    """Return the app of any node of the federation: of a client or of a helper.

    Args:
        clients: the clients' app; returned as it is if the federation has no helpers.
        experiment: the settings.
        base: the directory in which the experiment's relative paths start.
        record: records the sums of helpers on disk; in a simulation the server's record is enough.
    """
    settings = experiment.secure_aggregation
    if settings is None or not settings.helpers:
        return clients
    from fedsim.federation.lasting_keys import identity_of_helper
    from fedsim.server.secure.helper_app import make_helper_app

    first = experiment.num_clients

    def helper_number(context: Context) -> int:
        return partition_of(context) - first + 1

    def identity_of(context: Context) -> "IdentityKey | None":
        return identity_of_helper(
            settings, helper_number(context), base=base, node_config=context.node_config
        )

    def record_of(context: Context, release: "Release") -> None:
        record(helper_number(context), release)

    helper = make_helper_app(settings, helper_number, identity_of, record_of, first)
    node_class = _BatchNodeApp if isinstance(clients, BatchClientApp) else _NodeApp
    return node_class(clients, helper, first)


class _NodeApp(ClientApp):
    def __init__(self, clients: ClientApp, helper: ClientApp, num_clients: int) -> None:
        super().__init__()
        self._clients, self._helper = clients, helper
        self._num_clients = num_clients

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message as the node that the context names."""
        is_client = partition_of(context) < self._num_clients
        return (self._clients if is_client else self._helper)(message, context)


class _BatchNodeApp(_NodeApp):
    """A `_NodeApp` that answers several clients' requests at once; helpers get none of these."""

    _clients: BatchClientApp

    @property
    def takes_batches(self) -> bool:
        """Whether `answer_batch` may take the place of one call for each message."""
        return self._clients.takes_batches

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the clients' answers, as `BatchClientApp.answer_batch` does."""
        return self._clients.answer_batch(requests)

    def answer_requests(
        self, requests: Iterable[tuple[TrainRequest, Context]]
    ) -> Iterator[Iterator[Answer]]:
        """Yield the clients' answers, as `BatchClientApp.answer_requests` does."""
        return self._clients.answer_requests(requests)
