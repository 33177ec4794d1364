"""The server side as a Flower ServerApp.

The app waits for every client, learns which node is which client, and then runs the rounds itself.
It does not use Flower's `Strategy.start`, which starts at round 1, has no hook at the end of a
round and loses its result when a hook raises.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsim.algorithms.algorithm import Algorithm
from fedsim.algorithms.scored import scored_models
from fedsim.algorithms.state import ServerState
from fedsim.core.plugin_errors import plugin_calls
from fedsim.protocol.arrays import COEFFICIENTS, digest, is_coefficients, to_numpy, upload_base
from fedsim.protocol.channel import client_channel
from fedsim.protocol.errors import FederationError
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.protocol.traffic import Traffic
from fedsim.protocol.upload_tags import UploadTags
from fedsim.server.aggregation.aggregator import AggregationResult, Aggregator, PlainAggregator
from fedsim.server.aggregation.noisy_sum import IntegerSum, NoisySum, ServerNoise
from fedsim.server.aggregation.weights import ClientWeights, uniform_weights
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.early_stopping import EarlyStoppingSettings
from fedsim.server.evaluation import ClientEvaluation
from fedsim.server.participation.participation import Participation
from fedsim.server.roll_call import whole_roll
from fedsim.server.round_report import Failure, RoundReport, SecureRoundReport
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.server.settings import FederationSettings
from fedsim.server.shared_bound import SharedBound
from fedsim.server.timeline import Timeline
from fedsim.server.train_round import (
    ChargeRound,
    ExpectedNoise,
    PlannedSteps,
    TrainRound,
    TrainSetup,
)

if TYPE_CHECKING:
    from fedsim.server.secure.aggregator import SecureAggregationSetup

Metrics = Mapping[str, float | list[float]]

logger = logging.getLogger(__name__)

# A generous limit: it only has to end a run whose clients died silently.
MAX_ROUND_SECONDS = 24 * 3600.0


class RoundError(FederationError):
    """A round after which the federation cannot continue; `report` is the report of that round."""

    def __init__(self, message: str, report: RoundReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class NoisySumSetup:
    """What the server needs where clients send parts of noisy sums.

    Attributes:
        plan: the grid, the divisor and who adds the noise.
        noise: the server's noise.
        opened_sums: record of the sums that got noise, also of earlier processes of the run.
        tied: names of the model that share the values of another name.
        charge_round: charges every client for a round, where participation is secret.
    """

    plan: SumPlan
    noise: ServerNoise
    opened_sums: OpenedSums = field(default_factory=OpenedSums)
    tied: Mapping[str, str] = field(default_factory=dict)
    charge_round: ChargeRound | None = None


@dataclass(frozen=True)
class RoundSetup:
    """Everything of a server that is the same in all rounds.

    Attributes:
        train: algorithm, clients, schedule and aggregator.
        averaging: `federation.server_averaging`.
        early_stopping: `federation.early_stopping`; None: all rounds run.
        evaluate: metrics of a global model, or of several models, on the public test set.
        evaluation: evaluation on clients' held-out examples; None: there is none.
        declared_metrics: names of the metrics that clients send in a secure sum; None without
            secure aggregation.
    """

    train: TrainSetup
    evaluate: Callable[[ArrayRecord | Sequence[ArrayRecord]], Metrics]
    averaging: float | None = None
    early_stopping: EarlyStoppingSettings | None = None
    evaluation: ClientEvaluation | None = None
    declared_metrics: tuple[str, ...] | None = None


def make_server_app(
    *,
    settings: FederationSettings,
    algorithm: Algorithm,
    participation: Participation,
    start: ServerState,
    evaluate: Callable[[ArrayRecord | Sequence[ArrayRecord]], Metrics],
    on_round: Callable[[ServerState, RoundReport], None],
    ledgers: ClientLedgers | None,
    steps: PlannedSteps | None = None,
    stop_when_withdrawn: bool = False,
    on_stop: Callable[[str], None] = logger.info,
    patience: float = 60.0,
    secure: "SecureAggregationSetup | None" = None,
    evaluation: ClientEvaluation | None = None,
    upload_tags: UploadTags | None = None,
    weights: ClientWeights | None = None,
    noisy_sum: NoisySumSetup | None = None,
    shared_bound: SharedBound | None = None,
    expected_noise: ExpectedNoise | None = None,
    local_steps: Callable[[int, int], int] = lambda client, round_number: 1,
) -> ServerApp:
    """Return the ServerApp that runs the whole federation.

    Args:
        settings: rounds, deadline and averaging.
        algorithm: the federated algorithm.
        participation: the schedule of each client's rounds.
        start: the state to start from.
        evaluate: metrics of a global model, or of several models, on the public test set.
        on_round: called at the end of every round, in the server's thread.
        ledgers: the ledgers of the clients; None without privacy.
        steps: planned steps of a client in a round; a client that took fewer is reported.
        stop_when_withdrawn: end after the round in which the first client withdrew.
        on_stop: called with the reason when the federation ends before its last round because
            clients withdrew.
        patience: seconds to wait for all nodes.
        secure: secure aggregation; None: the server sees every update.
        evaluation: evaluation on clients' held-out examples; None: there is none.
        upload_tags: makes the tags of uploads; None: they are not recorded.
        weights: the weights of all clients; None: equal ones.
        noisy_sum: the noisy sums that clients send parts of; None: they send models.
        shared_bound: learns the bound of whole updates; None: it is fixed, or clients learn it.
        expected_noise: length of the noise in an aggregate, by plan values; None: not known.
        local_steps: (client, round) -> planned steps of its local training.

    The app raises FederationError when a node is missing, and RoundError when clients of a round
    failed and fewer than `settings.min_participants` updates came, when a client would reuse noise,
    or when a secure sum could not be opened (`on_abort: raise`).
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        helpers = 0 if secure is None else secure.settings.helpers
        roll = whole_roll(grid, participation.num_clients, helpers, patience=patience)
        planned = uniform_weights(participation.num_clients) if weights is None else weights
        aggregator: Aggregator[Any]
        if secure is not None:
            aggregator = secure.aggregator(planned, roll)
        elif noisy_sum is not None:
            aggregator = IntegerSum(noisy_sum.plan, num_clients=participation.num_clients)
        else:
            aggregator = PlainAggregator(planned, keeps_models=algorithm.uses_each_update)
        if noisy_sum is not None:
            aggregator = _noisy_sum(aggregator, noisy_sum, planned, participation)
        name = settings.algorithm.name
        logger.info("%s over %d clients, %s", name, len(roll.clients), aggregator.name)
        setup = RoundSetup(
            train=TrainSetup(
                algorithm,
                participation,
                roll.clients,
                aggregator,
                ledgers,
                steps,
                settings.deadline,
                upload_tags,
                planned,
                None if noisy_sum is None else noisy_sum.charge_round,
                shared_bound,
                expected_noise,
                local_steps,
            ),
            evaluate=evaluate,
            averaging=settings.server_averaging,
            early_stopping=settings.early_stopping,
            evaluation=evaluation,
            declared_metrics=None if secure is None else tuple(secure.settings.metrics),
        )
        state = start
        if state.round_number == 0:
            with plugin_calls("federation.strategy failed", raises=FederationError):
                state = algorithm.init(state)
        while state.round_number < settings.rounds:
            reason = _reason_to_stop(state.withdrawn, len(roll.clients), stop_when_withdrawn)
            stopping = settings.early_stopping
            if reason is None and stopping is not None:
                reason = stopping.reason_to_stop(state.best, state.round_number)
            if reason is not None:
                on_stop(reason)
                return
            state, report = run_round(state, setup, grid)
            check_end_of_run(report)
            if report.aborted is None:
                check_participants(report, settings.min_participants)
            elif secure is not None and secure.settings.on_abort == "raise":
                raise RoundError(_abort_message(report), report)
            on_round(state, report)

    return app


def run_round(state: ServerState, setup: RoundSetup, grid: Grid) -> tuple[ServerState, RoundReport]:
    """Run the round after `state`; return the state after it and its report.

    A round without an aggregate leaves the model as it was.
    """
    started, timeline = time.perf_counter(), Timeline()
    train = TrainRound(state, setup.train)
    traffic = Traffic()
    counted = traffic.of_grid(grid, setup.train.clients)
    with timeline.part("sample"):
        requests = train.requests(counted)
    with timeline.part("aggregate"):
        with timeline.part("train"):
            channel = client_channel(grid, setup.train.aggregator.reply_type)
            answers = traffic.count_training(channel, requests, timeout=MAX_ROUND_SECONDS)
        result = train.aggregate(timeline.waiting("train", answers))
        after = train.state_after(result, averaging=setup.averaging)
    with timeline.part("evaluate"):
        metrics = setup.evaluate(scored_models(setup.train.algorithm, after))
        if setup.early_stopping is not None:
            after = _with_best(after, setup.early_stopping, metrics)
        evaluation = None
        if setup.evaluation is not None:
            evaluation = setup.evaluation.run(
                after.round_number, after.model, setup.train.clients, counted, MAX_ROUND_SECONDS
            )
    with timeline.part("account"):
        epsilon = _largest_epsilon(setup.train.ledgers, train.failed)
    report = RoundReport(
        round_number=after.round_number,
        metrics=metrics,
        participants=tuple(train.participants),
        failed=tuple(train.failed),
        withdrawn=tuple(train.withdrawn),
        shortened=train.shortened,
        seconds=time.perf_counter() - started,
        epsilon_max=epsilon,
        timeline=timeline.seconds,
        clip_norms=after.clip_norms,
        aborted=train.aborted,
        uploads=dict(sorted(train.uploads.items())),
        model_digest=digest(after.model),
        secure=_secure_round(result, setup),
        evaluates=setup.evaluation is not None,
        evaluation=evaluation,
        traffic=traffic,
        update_norm=_update_norm(
            upload_base(state.arrays), result, setup.train.algorithm.training.parameters
        ),
        noise_norm=None if result.arrays is None else train.noise_norm,
        unmoved=_unmoved(state, after, setup.train.algorithm.training.parameters),
        partial=train.partial,
        simulated_time=train.simulated_time,
        staleness=train.staleness,
    )
    is_secret = setup.train.participation.is_secret
    return after, report.without_participants() if is_secret else report


def _with_best(
    state: ServerState, stopping: EarlyStoppingSettings, metrics: Metrics
) -> ServerState:
    """Return the state after a round with the best value of the metric.

    Raises:
        FederationError: the test set has no such metric, or it has a number for each class.
    """
    value = metrics.get(f"test_{stopping.metric}")
    if not isinstance(value, float):
        known = [
            name.removeprefix("test_") for name, one in metrics.items() if isinstance(one, float)
        ]
        raise FederationError(
            f"federation.early_stopping.metric: {stopping.metric} is no number of the test set; "
            f"choose from {', '.join(known)}, or add it to evaluation.metrics"
        )
    return replace(state, best=stopping.next_best(state.best, value, state.round_number))


def check_end_of_run(report: RoundReport) -> None:
    """Check that no client of a round failed in a way that ends the run.

    A client that would reuse noise is not simply left out: the run is not the one that began. And
    where the run's ledger cannot be written, no client can be charged.

    Raises:
        RoundError: with the client's reason.
    """
    for failure in report.failed:
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
    if not report.failed or len(report.participants) >= least:
        return
    first, failed, came = report.failed[0], len(report.failed), len(report.participants)
    what = f"{failed} clients failed" if came else f"every client failed ({failed})"
    raise RoundError(
        f"round {report.round_number}: {what} and {came} of at least {least} updates came "
        f"(federation.min_participants); client {first.client}: {first.reason}",
        report,
    )


def _reason_to_stop(
    withdrawn: frozenset[int], num_clients: int, stop_when_withdrawn: bool
) -> str | None:
    if len(withdrawn) == num_clients:
        return "every client has spent its privacy budget"
    if withdrawn and stop_when_withdrawn:
        names = ", ".join(str(client) for client in sorted(withdrawn)[:10])
        return f"the privacy budget of client {names} is spent (on_exhausted: stop)"
    return None


def _noisy_sum(
    sums: Aggregator[Any],
    setup: NoisySumSetup,
    weights: ClientWeights,
    participation: Participation,
) -> NoisySum:
    return NoisySum(
        sums,
        setup.plan,
        weights,
        setup.noise,
        opened_sums=setup.opened_sums,
        secret=participation.is_secret,
        tied=setup.tied,
    )


def _secure_round(result: AggregationResult, setup: RoundSetup) -> SecureRoundReport | None:
    if setup.declared_metrics is None:
        return None
    return SecureRoundReport(
        retried=setup.train.aggregator.retried,
        clipped=result.clipped,
        clipped_metrics=result.clipped_metrics,
        metrics={name: result.metrics.get(name) for name in setup.declared_metrics},
    )


def _largest_epsilon(ledgers: ClientLedgers | None, failed: Iterable[Failure]) -> float | None:
    """Return the largest ε of any client; a client that failed may have been charged."""
    if ledgers is None:
        return None
    for failure in failed:
        ledgers.look_up(failure.client)
    return ledgers.epsilon_max()


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
