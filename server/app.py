"""The server as a Flower ServerApp: it waits for node registration and then runs all rounds.

The app waits for every client and learns which node is which client. It does not use Flower's
`Strategy.start`. That method always starts at round 1, has no hook at the end of a round, and loses
its result when a hook raises.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsim.algorithms.algorithm import Algorithm
from fedsim.algorithms.state import ServerState
from fedsim.core.plugin_errors import plugin_calls
from fedsim.protocol.arrays import (
    COEFFICIENTS,
    digest,
    is_coefficients,
    to_arrays,
    to_numpy,
    upload_base,
)
from fedsim.protocol.errors import NODE_RESTARTED, FederationError, ProtocolError
from fedsim.protocol.node_registration import (
    NodeIdentity,
    NumberedGrid,
    identity_of,
    registration_message,
)
from fedsim.protocol.traffic import (
    NO_REPLY,
    ClientError,
    CountedGrid,
    Traffic,
    client_channel,
    exchange,
)
from fedsim.server.aggregation.aggregator import AggregationResult
from fedsim.server.round_report import PARTS, RoundCost, RoundModel, RoundReport, SecureRoundReport
from fedsim.server.settings import FederationSettings
from fedsim.server.train_round import RoundSetup, TrainRound

# The longest time until a node answers: it may start a process, which loads its data.
NODE_SECONDS = 600.0
# Flower's error codes for a message or a node that is no longer there, and that of a restart.
_GONE = {3, 4, 5, NODE_RESTARTED}


@dataclass(frozen=True)
class RegisteredNodes:
    """Map from Flower's node ids to the numbers of clients and of helpers.

    Clients are numbered from 0, helpers (extra parties of secure aggregation) from 1.

    Attributes:
        clients: client number by node id, for each node that is a client.
        helpers: helper number by node id, for each node that is a helper.
    """

    clients: Mapping[int, int]
    helpers: Mapping[int, int] = field(default_factory=dict)


def register_nodes(
    grid: Grid, num_clients: int, num_helpers: int, *, patience: float = NODE_SECONDS
) -> RegisteredNodes:
    """Wait until all clients and helpers have registered, and return which node is which party.

    Flower's simulation starts the server before its nodes exist. A round that started at once would
    silently miss clients. Listed nodes that no longer answer, such as a SuperNode before its
    restart, are skipped. A grid that created the nodes knows their roles, so no node is asked.

    Args:
        grid: Flower's grid, which sends messages to the nodes.
        num_clients: the number of clients of the federation.
        num_helpers: the number of helpers of secure aggregation.
        patience: the longest time to wait, in seconds.

    Raises:
        FederationError: fewer nodes than parties register within `patience` seconds, or two nodes
            are the same client or helper.
        ProtocolError: a node reports that it cannot take part; the message says why.
    """
    deadline = time.monotonic() + patience
    expected = num_clients + num_helpers
    known = grid.numbered_nodes() if isinstance(grid, NumberedGrid) else None
    if known is not None and len(known) == expected:
        return RegisteredNodes(
            {node: client for client, node in enumerate(known[:num_clients])},
            {node: helper for helper, node in enumerate(known[num_clients:], start=1)},
        )
    there: dict[int, NodeIdentity] = {}
    while len(there) < expected:
        nodes = _wait_for_nodes(grid, expected, deadline, patience)
        answers = exchange(
            grid,
            {node: registration_message(node) for node in nodes},
            timeout=max(1.0, deadline - time.monotonic()),
        )
        there = {node: _identity(node, answer) for node, answer in answers if not _is_gone(answer)}
        if len(there) < expected:
            if time.monotonic() > deadline:
                raise FederationError(
                    f"only {len(there)} of {expected} nodes answered within {patience:g} s"
                )
            time.sleep(0.5)
    return RegisteredNodes(
        _numbers_of("client", there, range(num_clients)),
        _numbers_of("helper", there, range(1, num_helpers + 1)),
    )


def _is_gone(answer: Message | ClientError) -> bool:
    return isinstance(answer, ClientError) and (answer is NO_REPLY or answer.code in _GONE)


def _identity(node: int, answer: Message | ClientError) -> NodeIdentity:
    if isinstance(answer, ClientError):
        raise ProtocolError(f"node {node} failed: {answer.reason}")
    return identity_of(answer)


def _numbers_of(role: str, nodes: Mapping[int, NodeIdentity], wanted: range) -> dict[int, int]:
    """Return the number of each node with a role, after a check that these are the wanted ones."""
    numbers = {node: identity.number for node, identity in nodes.items() if identity.role == role}
    if sorted(numbers.values()) != list(wanted):
        expected = f"{wanted.start}..{wanted.stop - 1}" if wanted else "none"
        raise FederationError(
            f"expected one node for each of the {role}s {expected}, "
            f"got {role}s {sorted(numbers.values())}"
        )
    return numbers


def _wait_for_nodes(grid: Grid, num_clients: int, deadline: float, patience: float) -> list[int]:
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= num_clients:
            return nodes
        if time.monotonic() > deadline:
            raise FederationError(
                f"only {len(nodes)} of {num_clients} nodes connected within {patience:g} s"
            )
        time.sleep(0.05)


def scored_models(algorithm: Algorithm, state: ServerState) -> ArrayRecord | Sequence[ArrayRecord]:
    """Return the models to evaluate after a round: the global model, or one model per client.

    Args:
        algorithm: the algorithm of the federation. An algorithm that trains one model per client,
            such as MR-MTL, is evaluated on these models.
        state: the server's state after a round.

    Raises:
        FederationError: the code of the federated algorithm raised an error, or returned no model.
    """
    with plugin_calls("federation.strategy failed", raises=FederationError):
        models = algorithm.scored_models(state)
        if models is None:
            return state.model
        if not models:
            raise ValueError("scored_models returned no model; return None for the global one")
        return [to_arrays(dict(model)) for model in models]


logger = logging.getLogger(__name__)

# Long on purpose: the limit only has to end a run whose clients died silently.
MAX_ROUND_SECONDS = 24 * 3600.0


class RoundError(FederationError):
    """Error that ends the federation after a round; `report` is the report of that round."""

    def __init__(self, message: str, report: RoundReport) -> None:
        super().__init__(message)
        self.report = report


def make_server_app(
    settings: FederationSettings,
    prepare: Callable[[Grid], RoundSetup],
    *,
    start: ServerState,
    on_round: Callable[[ServerState, RoundReport], None],
    on_stop: Callable[[str], None] = logger.info,
) -> ServerApp:
    """Return the ServerApp that runs the whole federation.

    Args:
        settings: the number of rounds, and the fewest participants of a round.
        prepare: function that waits for the nodes and returns the setup of all rounds.
        start: the server state to start from.
        on_round: function that is called at the end of every round, in the server's thread, with
            the new state and the report.
        on_stop: function that is called with the reason if the federation ends early.

    The app raises FederationError if a node is missing. It raises RoundError if clients of a round
    failed and fewer than `settings.min_participants` updates arrived. It also raises RoundError if
    a client would reuse noise, or if a secure sum could not be computed (`on_abort: raise`).
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        setup = prepare(grid)
        name, clients = settings.algorithm.name, len(setup.clients)
        logger.info("%s over %d clients, %s", name, clients, setup.aggregator.name)
        state = start
        if state.round_number == 0:
            with plugin_calls("federation.strategy failed", raises=FederationError):
                state = setup.algorithm.init(state)
        while state.round_number < settings.rounds:
            reasons = (part.reason_to_stop(state) for part in setup.parts)
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is not None:
                on_stop(reason)
                return
            state, report = run_round(state, setup, grid)
            check_end_of_run(report)
            if report.aborted is None:
                check_participants(report, settings.min_participants)
            elif setup.aggregator.ends_run_on_abort:
                raise RoundError(
                    f"round {report.round_number} was given up "
                    f"(secure_aggregation.on_abort: raise): {report.aborted}",
                    report,
                )
            on_round(state, report)

    return app


class Timeline:
    """Stopwatch for the consecutive phases of a round; a phase may occur more than once.

    Guarantee: the seconds of all phases add up to the time between the first and the last `begin`.

    Args:
        clock: function that returns the monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: str | None = None
        self._since = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall-clock seconds of each phase so far, by the phase's name."""
        return dict(self._seconds)

    def begin(self, part: str | None) -> None:
        """End the current phase of the round and begin the phase `part`; None begins no phase.

        Raises:
            KeyError: `part` is not one of the names in `PARTS`.
        """
        now = self._clock()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        if part is not None and part not in self._seconds:
            raise KeyError(part)
        self._part, self._since = part, now


def run_round(state: ServerState, setup: RoundSetup, grid: Grid) -> tuple[ServerState, RoundReport]:
    """Run one round and return the new server state and the report of the round.

    If no update could be aggregated, the model stays as it was.

    Args:
        state: the server state before the round.
        setup: the objects and settings that all rounds share.
        grid: Flower's grid, which sends messages to clients and helpers.
    """
    started, timeline, traffic = time.perf_counter(), Timeline(), Traffic()
    train = TrainRound(state, setup)
    counted = CountedGrid(grid, traffic, setup.clients)
    timeline.begin("sample")
    requests = train.requests(counted)
    timeline.begin("train")
    traffic.send(requests)
    channel = client_channel(grid, setup.aggregator.reply_type)
    for node, answer in channel.train(requests, timeout=MAX_ROUND_SECONDS):
        timeline.begin("aggregate")
        traffic.receive(answer)
        if not train.take(node, answer):
            break
        timeline.begin("train")
    timeline.begin("aggregate")
    result = train.finish()
    after = train.state_after()
    timeline.begin("evaluate")
    metrics = setup.evaluate(scored_models(setup.algorithm, after))
    for part in setup.parts:
        after = part.scored(after, metrics)
    evaluation = "off"
    if setup.evaluation is not None:
        evaluation = setup.evaluation.run(
            after.round_number, after.model, setup.nodes, counted, MAX_ROUND_SECONDS
        )
    timeline.begin("account")
    report = RoundReport(
        after.round_number,
        metrics,
        clients=train.clients,
        model=_model_of(state, after, result, setup.algorithm.training.parameters),
        clip_norms=after.clip_norms,
        aborted=train.aborted,
        secure=_secure_round(result, setup),
        evaluation=evaluation,
    )
    for part in setup.parts:
        report = part.complete(report, train.aggregate)
    timeline.begin(None)
    seconds, simulated = time.perf_counter() - started, report.cost.simulated_time
    report = replace(report, cost=RoundCost(seconds, timeline.seconds, traffic, simulated))
    is_secret = setup.participation.is_secret
    return after, report.without_participants() if is_secret else report


def check_end_of_run(report: RoundReport) -> None:
    """Raise if a client of a round failed in a way that ends the run.

    Two failures end the run. A client that would reuse noise shows that this run differs from the
    run that began. And if the run's ledger cannot be written, no client can be charged.

    Raises:
        RoundError: a client failed in one of these ways; the message gives the reason.
    """
    for failure in report.clients.failed:
        if failure.ends_run:
            raise RoundError(f"round {report.round_number}: {failure.reason}", report)


def check_participants(report: RoundReport, least: int) -> None:
    """Raise if clients failed in a round and too few updates are in the aggregate.

    Args:
        report: the report of the round.
        least: the smallest number of updates that a round with failed clients needs.

    Raises:
        RoundError: clients failed, and fewer than `least` updates arrived.
    """
    if not report.clients.failed or len(report.clients.participants) >= least:
        return
    clients = report.clients
    first, failed, came = clients.failed[0], len(clients.failed), len(clients.participants)
    failures = f"{failed} clients failed" if came else f"every client failed ({failed})"
    raise RoundError(
        f"round {report.round_number}: {failures} and {came} of at least {least} updates came "
        f"(federation.min_participants); client {first.client}: {first.reason}",
        report,
    )


def _secure_round(result: AggregationResult, setup: RoundSetup) -> SecureRoundReport | None:
    declared = setup.aggregator.declared_metrics
    if declared is None:
        return None
    return SecureRoundReport(
        retried=setup.aggregator.retried,
        clipped=result.clipped,
        clipped_metrics=result.clipped_metrics,
        metrics={name: result.metrics.get(name) for name in declared},
    )


def _model_of(
    before: ServerState,
    after: ServerState,
    result: AggregationResult,
    parameters: Collection[str],
) -> RoundModel:
    return RoundModel(
        digest=digest(after.model),
        update_norm=_update_norm(upload_base(before.arrays), result, parameters),
        unmoved=() if result.arrays is None else _unmoved(before, after, parameters),
    )


def _update_norm(
    before: ArrayRecord, result: AggregationResult, parameters: Collection[str]
) -> float | None:
    """Return the L2 norm of the aggregate update of the trained values, or None without an update.

    The aggregate is a function of releases, so the norm is post-processing.
    """
    if result.arrays is None:
        return None
    old, new = to_numpy(before), result.values
    steps = [np.subtract(new[name], old[name], dtype=np.float64) for name in sorted(parameters)]
    # Not by dot products: numpy's matrix library would start threads, which then wait busily, and
    # the result would depend on their number.
    return math.sqrt(math.fsum(float(np.square(step).sum()) for step in steps))


def _unmoved(
    before: ServerState, after: ServerState, parameters: Collection[str]
) -> tuple[str, ...]:
    """Return the names of trained tensors that round 1 did not change; empty after later rounds.

    The models are releases, so the result is post-processing.
    """
    if before.round_number or after.arrays is before.arrays:
        return ()
    if is_coefficients(after.arrays):
        return () if after.values[COEFFICIENTS].any() else (COEFFICIENTS,)
    old, new = before.values, after.values
    named = [name for name in sorted(parameters) if old[name].size]
    return tuple(name for name in named if np.array_equal(old[name], new[name]))
