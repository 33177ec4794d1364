"""Flower apps of a federation: the ServerApp, and the ClientApp of all nodes of one process.

Nodes 0 to `num_clients` - 1 are clients, the next node is helper 1 of secure aggregation. A helper
belongs to the server's side. Only a simulation runs a helper in one process with clients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.algorithms.state import ServerState
from fedsim.clients.account import Accounts, ChargeRefusedError, request_digest
from fedsim.clients.app import BatchClientApp, partition_of
from fedsim.clients.client_round import BlockOf
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.aggregate_noise import ClientNoise, sum_noise
from fedsim.federation.charged_noise import server_noise
from fedsim.federation.federation import Federation
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import FederationError
from fedsim.protocol.noisy_sums import BoundRule
from fedsim.protocol.upload_tags import UploadTags
from fedsim.server.aggregation.aggregator import Aggregator, PlainAggregator
from fedsim.server.aggregation.noisy_sum import IntegerSum, NoisySum
from fedsim.server.app import RegisteredNodes, make_server_app, register_nodes
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.evaluation import ClientEvaluation
from fedsim.server.round_parts import (
    ChargeRound,
    Charges,
    EarlyStopping,
    ExpectedNoise,
    IterateAverage,
    NoiseLength,
    OwnBounds,
    RoundPart,
    SharedBound,
    Tags,
    Withdrawals,
)
from fedsim.server.round_report import RoundReport
from fedsim.server.secure.opened_sums import NO_OPENED_SUMS, OpenedSums
from fedsim.server.stale_updates import StaleUpdates
from fedsim.server.train_round import RoundSetup

if TYPE_CHECKING:
    from fedsim.secagg.identity import IdentityKey
    from fedsim.server.secure.helper import HelperRelease

_RELEASES_PER_ROUND = 1  # a round is one release of a client, whatever local.steps is


def server_app(
    federation: Federation,
    *,
    start: ServerState,
    on_round: Callable[[ServerState, RoundReport], None],
    on_stop: Callable[[str], None],
    ledgers: ClientLedgers | None,
    opened_sums: OpenedSums = NO_OPENED_SUMS,
    given_up: Mapping[int, str] | None = None,
) -> ServerApp:
    """Return the ServerApp of a federation.

    Args:
        federation: the federation to run.
        start: the server state to start from.
        on_round: function that is called after each round with the new server state and the report.
        on_stop: function that is called with the reason if the federation stops early.
        ledgers: the latest ledger of every client; None without privacy.
        opened_sums: the record on disk of the sums that secure aggregation opened.
        given_up: the reason to give up a round, by its number, for a replay; None gives up no round
            but those without a sum.
    """
    experiment = federation.experiment
    evaluation = experiment.client_evaluation
    settings = experiment.federation

    def prepare(grid: Grid) -> RoundSetup:
        helpers = federation.num_nodes - federation.num_clients
        registered = register_nodes(grid, federation.num_clients, helpers)
        return RoundSetup(
            federation.algorithm,
            federation.plan.participation,
            registered.clients,
            _aggregator(federation, registered, opened_sums),
            federation.test_metrics,
            weights=federation.plan.weights,
            steps=federation.plan.steps,
            deadline=settings.deadline,
            evaluation=None
            if evaluation is None
            else ClientEvaluation(evaluation, experiment.seed, settings.rounds, settings.deadline),
            parts=tuple(_parts(federation, ledgers)),
            given_up=given_up or {},
        )

    return make_server_app(settings, prepare, start=start, on_round=on_round, on_stop=on_stop)


def _aggregator(
    federation: Federation, registered: RegisteredNodes, opened_sums: OpenedSums
) -> Aggregator[Any]:
    """Return the aggregator: secure or in clear, of models or of integers."""
    experiment, weights, sums = federation.experiment, federation.plan.weights, federation.plan.sums
    aggregator: Aggregator[Any]
    if federation.secure is not None:
        from fedsim.server.secure.aggregator import SecureAggregator

        aggregator = SecureAggregator(
            settings=federation.secure.settings,
            codec=federation.secure.codec,
            registered=registered,
            opened_sums=opened_sums,
            weights=weights,
            plan=federation.plan.digest,
        )
    elif sums is not None:
        aggregator = IntegerSum(sums, num_clients=federation.num_clients)
    else:
        aggregator = PlainAggregator(weights, keeps_models=federation.algorithm.uses_each_update)
    if sums is None or experiment.privacy is None:
        return aggregator
    return NoisySum(
        aggregator,
        sums,
        weights,
        server_noise(federation, experiment.seed if experiment.privacy.noise == "seeded" else None),
        opened_sums=opened_sums,
        secret=federation.plan.participation.is_secret,
        tied=federation.model.shared.tied_names,
    )


def _parts(federation: Federation, ledgers: ClientLedgers | None) -> Iterator[RoundPart]:
    """Yield the parts of the federation's rounds."""
    experiment, participation = federation.experiment, federation.plan.participation
    privacy, settings = experiment.privacy, experiment.federation
    if not experiment.has_server_noise:  # with central trust an upload is no release
        yield Tags(UploadTags(experiment.seed))
    yield _shared_bound(federation) or OwnBounds()
    charge_round = _charge_round(federation)
    if ledgers is not None or charge_round is not None:
        yield Charges(ledgers, charge_round)
    if participation.buffered is not None:
        yield StaleUpdates(participation.buffered)
    expected = _expected_noise(federation)
    if expected is not None:
        yield NoiseLength(expected)
    if settings.ema_decay is not None:
        yield IterateAverage(settings.ema_decay)
    first_ends = privacy is not None and privacy.on_exhausted == "stop"
    yield Withdrawals(federation.num_clients, first_ends)
    if settings.early_stopping is not None:
        yield EarlyStopping(settings.early_stopping)


def _shared_bound(federation: Federation) -> SharedBound | None:
    """Return the part that adapts the clip norm of whole updates, or None where there is none."""
    privacy, sums = federation.experiment.privacy, federation.plan.sums
    learns = federation.experiment.release_kind.server_learns_bound
    if privacy is None or not learns or privacy.clipping.name != "adaptive":
        return None
    return SharedBound(
        privacy.clip_norm,
        BoundRule(privacy.clipping.quantile, privacy.clipping.learning_rate),
        federation.num_clients,
        None if sums is None else sums.count_unit,
        None if sums is None else sums.divisor,
    )


def _charge_round(federation: Federation) -> ChargeRound | None:
    """Return the function that charges all clients, or None where clients charge themselves."""
    if federation.plan.sums is None or not federation.plan.participation.is_secret:
        return None
    return ServerCharges(
        federation.plan.clients or (),
        federation.accounts,
        conditions=federation.conditions,
        seed=federation.experiment.seed,
    ).charge


def _expected_noise(federation: Federation) -> ExpectedNoise | None:
    """Return the function for the expected noise norm of a round, or None if it is not known."""
    experiment, weights = federation.experiment, federation.plan.weights.values
    privacy, parameters = experiment.privacy, federation.release_parameters
    if privacy is None or federation.plan.clients is None or not _averages_plain_steps(federation):
        return None
    if privacy.is_correlated and federation.plan.sums is not None:
        return None  # rounds take back noise of earlier ones
    if federation.plan.sums is not None:
        return sum_noise(federation.plan.sums, weights, privacy.clip_norm, parameters.size)
    if federation.plan.participation.is_secret:  # the norm would show the number of participants
        return None
    return ClientNoise(federation.plan.clients, weights, parameters, experiment.local)


def _averages_plain_steps(federation: Federation) -> bool:
    """Whether the noise in the aggregate is the weighted mean of the noise of local steps."""
    algorithm = federation.algorithm
    is_mean = not (algorithm.uses_each_update or algorithm.weighs_steps)
    scales = federation.plan.participation.buffered is not None  # stale updates
    return federation.goal.averages and is_mean and not scales and algorithm.client() is None


class ServerCharges:
    """Object by which a server that draws clients in secret charges every client for every round.

    Clients usually charge themselves. If the server draws clients in secret, a client that charged
    itself would show that it was drawn. So the server charges every client, and writes this to the
    ledger before it draws the noise.

    Guarantee: when `charge` returns, the charge of every client for the round is on disk. A round
    that is repeated with the same seeded noise, model and settings is not charged again, as its
    release is the same. A release with other noise is charged.

    Args:
        plans: the privacy plan of each client.
        accounts: the clients' privacy accounts.
        conditions: the digest of the settings, plug-in sources, versions and device of the run.
        seed: the experiment's seed.
    """

    def __init__(
        self, plans: Sequence[PrivacyPlan], accounts: Accounts, *, conditions: str, seed: int
    ) -> None:
        self._plans, self._accounts, self._conditions = plans, accounts, conditions
        self._seed = seed

    def charge(self, round_number: int, model: str) -> Sequence[ClientSpend]:
        """Charge every client for a round; return each client's spend, in the order of clients.

        Args:
            round_number: the round.
            model: the digest of the global model from which the round starts.

        Raises:
            FederationError: the ledger cannot be written, or a client was charged for another
                release of this round; nothing may be released.
        """
        accounts = [self._accounts.of(client, plan) for client, plan in enumerate(self._plans)]
        try:
            charges = [
                account.propose(
                    round_number=round_number,
                    request=self._request(client, account.plan, model),
                    steps=_RELEASES_PER_ROUND,
                )
                for client, account in enumerate(accounts)
            ]
            proposed = zip(accounts, charges, strict=True)
            charged = self._accounts.charge(
                [(account, charge) for account, charge in proposed if charge is not None]
            )
        except ChargeRefusedError as error:
            raise FederationError(
                f"round {round_number}: no client was charged: {error}"
            ) from error
        new = {account.spend.client: account for account in charged}
        return [new.get(client, account).spend for client, account in enumerate(accounts)]

    def _request(self, client: int, plan: PrivacyPlan, model: str) -> str:
        """Return the digest of the release that a charge is for, which names no participant."""
        return request_digest(
            seed=self._seed,
            client=client,
            block=(),
            padded_rows=None,
            model=model,
            clip_norm=None,
            mechanism=plan.mechanism_text,
            conditions=self._conditions,
            data=None,
        )


def client_app(federation: Federation, block_of: BlockOf | None = None) -> ClientApp:
    """Return the ClientApp that all nodes of a federation run in this process.

    Args:
        federation: the assembled federation.
        block_of: function that returns the clients of this process that train together with a given
            client; None for the planned groups.
    """
    block_of = block_of or federation.blocks.plan.block_of
    clients = BatchClientApp(federation.client_task, block_of=block_of)
    return make_node_app(clients, federation.experiment, federation.base)


def num_helpers(experiment: Experiment) -> int:
    """Return the number of helpers of secure aggregation in an experiment."""
    settings = experiment.secure_aggregation
    return 0 if settings is None else settings.helpers


RecordRelease: TypeAlias = "Callable[[int, HelperRelease], None]"
"""(helper, release) -> None: records a sum that a helper is about to release."""


def make_node_app(
    clients: BatchClientApp, experiment: ExperimentWithClients, base: Path
) -> ClientApp:
    """Return an app for all nodes: it acts as a client or as a helper, as the node's number says.

    Args:
        clients: the clients' app; returned unchanged if the federation has no helpers.
        experiment: the settings.
        base: the directory in which the experiment's relative paths start.
    """
    if not num_helpers(experiment):
        return clients
    return _NodeApp(clients, helper_app(experiment, base), experiment.num_clients)


def helper_app(
    experiment: ExperimentWithClients,
    base: Path,
    record: RecordRelease = lambda helper, release: None,
) -> ClientApp:
    """Return an app for the nodes that are helpers.

    Args:
        experiment: the settings, with secure aggregation.
        base: the directory in which the experiment's relative paths start.
        record: function of (helper, release) that writes each sum that a helper opens to the
            helper's disk. By default it writes nothing, as a simulation needs only the server's
            record.
    """
    from fedsim.federation.secure_setup import identity_of_helper
    from fedsim.server.secure.helper_app import make_helper_app

    settings, first = experiment.secure_aggregation, experiment.num_clients
    if settings is None:
        raise ValueError("an experiment without secure_aggregation has no helpers")

    def helper_number(context: Context) -> int:
        return partition_of(context) - first + 1

    def identity_of(context: Context) -> "IdentityKey | None":
        return identity_of_helper(
            settings, helper_number(context), base=base, node_config=context.node_config
        )

    def record_of(context: Context, release: "HelperRelease") -> None:
        record(helper_number(context), release)

    return make_helper_app(settings, helper_number, identity_of, record_of, first)


class _NodeApp(ClientApp):
    """App of clients and helpers, which answers several clients at once and helpers singly."""

    def __init__(self, clients: BatchClientApp, helper: ClientApp, num_clients: int) -> None:
        super().__init__()
        self._clients, self._helper = clients, helper
        self._num_clients = num_clients
        self.takes_batches = clients.takes_batches
        self.answer_batch = clients.answer_batch
        self.answer_requests = clients.answer_requests

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message as the node that the context names."""
        is_client = partition_of(context) < self._num_clients
        return (self._clients if is_client else self._helper)(message, context)
