"""The server side as a Flower ServerApp.

The app waits for every client, learns which node is which client, and then runs the rounds itself.
It does not use Flower's `Strategy.start`, which starts at round 1, has no hook at the end of a
round and loses its result when a hook raises.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, Context
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
from fedsim.protocol.channel import client_channel
from fedsim.protocol.errors import FederationError
from fedsim.protocol.traffic import CountedGrid, Traffic
from fedsim.server.aggregation.aggregator import AggregationResult
from fedsim.server.round_report import (
    RoundCost,
    RoundModel,
    RoundReport,
    SecureRoundReport,
    Timeline,
)
from fedsim.server.settings import FederationSettings
from fedsim.server.train_round import RoundSetup, TrainRound


def scored_models(algorithm: Algorithm, state: ServerState) -> ArrayRecord | Sequence[ArrayRecord]:
    """Return the model of a state, or the clients' own models where an algorithm has them.

    Args:
        algorithm: of the federation.
        state: after a round.
    """
    models = algorithm.scored_models(state)
    if models is None:
        return state.model
    return [to_arrays(dict(model)) for model in models]


logger = logging.getLogger(__name__)

# A generous limit: it only has to end a run whose clients died silently.
MAX_ROUND_SECONDS = 24 * 3600.0


class RoundError(FederationError):
    """A round after which the federation cannot continue; `report` is the report of that round."""

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
        settings: rounds, and the fewest participants of one.
        prepare: waits for the nodes, and returns what is the same in all rounds.
        start: the state to start from.
        on_round: called at the end of every round, in the server's thread.
        on_stop: called with the reason when the federation ends before its last round.

    The app raises FederationError when a node is missing, and RoundError when clients of a round
    failed and fewer than `settings.min_participants` updates came, when a client would reuse noise,
    or when a secure sum could not be opened (`on_abort: raise`).
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
            reason = next((one for one in reasons if one is not None), None)
            if reason is not None:
                on_stop(reason)
                return
            state, report = run_round(state, setup, grid)
            check_end_of_run(report)
            if report.aborted is None:
                check_participants(report, settings.min_participants)
            elif setup.aggregator.ends_run_on_abort:
                raise RoundError(_abort_message(report), report)
            on_round(state, report)

    return app


def run_round(state: ServerState, setup: RoundSetup, grid: Grid) -> tuple[ServerState, RoundReport]:
    """Run the round after `state`; return the state after it and its report.

    A round without an aggregate leaves the model as it was.
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
            after.round_number, after.model, setup.clients, counted, MAX_ROUND_SECONDS
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
    """Check that no client of a round failed in a way that ends the run.

    A client that would reuse noise is not simply left out: the run is not the one that began. And
    where the run's ledger cannot be written, no client can be charged.

    Raises:
        RoundError: with the client's reason.
    """
    for failure in report.clients.failed:
        if failure.ends_run:
            raise RoundError(f"round {report.round_number}: {failure.reason}", report)


def check_participants(report: RoundReport, least: int) -> None:
    """Check that a round has enough updates to count.

    Args:
        report: the round.
        least: fewest updates of a round in which clients failed.

    Raises:
        RoundError: clients failed, and fewer than `least` updates came.
    """
    if not report.clients.failed or len(report.clients.participants) >= least:
        return
    clients = report.clients
    first, failed, came = clients.failed[0], len(clients.failed), len(clients.participants)
    what = f"{failed} clients failed" if came else f"every client failed ({failed})"
    raise RoundError(
        f"round {report.round_number}: {what} and {came} of at least {least} updates came "
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
        unmoved=_unmoved(before, after, parameters),
    )


def _update_norm(
    before: ArrayRecord, result: AggregationResult, parameters: Collection[str]
) -> float | None:
    """Return the L2 norm of the aggregate update of the trained values; None without one.

    The aggregate is made of releases, so this is post-processing of them.
    """
    if result.arrays is None:
        return None
    old, new = to_numpy(before), result.values
    steps = [np.subtract(new[name], old[name], dtype=np.float64) for name in sorted(parameters)]
    return math.sqrt(math.fsum(float(np.vdot(step, step)) for step in steps))


def _unmoved(
    before: ServerState, after: ServerState, parameters: Collection[str]
) -> tuple[str, ...]:
    """Return the trained tensors that round 1 left as they were; none after other rounds.

    The models are releases, so this is post-processing of them.
    """
    if before.round_number or after.arrays is before.arrays:
        return ()
    if is_coefficients(after.arrays):
        return () if after.values[COEFFICIENTS].any() else (COEFFICIENTS,)
    old, new = before.values, after.values
    named = [name for name in sorted(parameters) if old[name].size]
    return tuple(name for name in named if np.array_equal(old[name], new[name]))


def _abort_message(report: RoundReport) -> str:
    return (
        f"round {report.round_number} was given up (secure_aggregation.on_abort: raise): "
        f"{report.aborted}"
    )
