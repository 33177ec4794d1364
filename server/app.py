"""The server side as a Flower ServerApp.

The app waits for every client, learns who is who, and then runs the rounds itself through the hooks
of a Flower `Strategy`. It does not use `Strategy.start`, which starts at round 1, offers no hook at
the end of a round and loses everything when one raises.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsim.protocol.messages import Withdrawal
from fedsim.secagg.payload import PayloadCodec
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.aggregation.strategies import Failure, FedAvg
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.errors import FederationError
from fedsim.server.evaluation import ClientEvaluation, EvaluationResult
from fedsim.server.participation import Participation
from fedsim.server.roll_call import Roll, whole_roll
from fedsim.server.secure.aggregator import SecureAggregator
from fedsim.server.secure.opened_sums import OpenedSums
from fedsim.server.settings import FederationSettings
from fedsim.server.timeline import Timeline

Metrics = Mapping[str, float]

logger = logging.getLogger(__name__)

# A generous limit: it only has to end a run whose clients died silently.
_LONG = 24 * 3600.0


@dataclass(frozen=True)
class RoundResult:
    """One finished round: the new global model and what is said about it.

    `metrics` are those of the global model on the server's test set; `epsilon_max` is the largest
    cumulative ε of any client, None without privacy. `withdrawn` are the clients that left in this
    round; `shortened` has the steps of those that took fewer than asked. A round without
    participants leaves the model as it was, and so does one that was `aborted`, for that reason;
    `retried` questions of secure aggregation were asked again, `clipped` values of updates were
    clipped, and so were metrics of `clipped_metrics` clients. `client_metrics` are the means of
    metrics that clients declared, over those in the sum.
    `timeline` divides `seconds` by `PARTS`. `clip_norms` has the bound that the clipping of each
    client has learnt so far, where it learns. `evaluated` is what clients found of the model on
    their held-out examples; None where nobody was asked.
    """

    round_number: int
    arrays: ArrayRecord
    metrics: Metrics
    participants: tuple[int, ...]
    failed: tuple[Failure, ...]
    withdrawn: tuple[Withdrawal, ...]
    shortened: Mapping[int, int]
    seconds: float
    epsilon_max: float | None
    timeline: Mapping[str, float] = field(default_factory=dict)
    clip_norms: Mapping[int, float] = field(default_factory=dict)
    aborted: str | None = None
    retried: int = 0
    clipped: int = 0
    clipped_metrics: int = 0
    client_metrics: Metrics = field(default_factory=dict)
    evaluated: EvaluationResult | None = None


class RoundError(FederationError):
    """A round ended in a way that the federation cannot go on from; `result` is that round."""

    def __init__(self, message: str, result: RoundResult) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Start:
    """Where a federation starts: before round `first_round`, with these arrays.

    `withdrawn` are the clients that left in the rounds before; `clip_norms` are the bounds that
    clipping has learnt in them.
    """

    arrays: ArrayRecord
    first_round: int = 1
    withdrawn: frozenset[int] = frozenset()
    clip_norms: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SecureAggregation:
    """What the server needs to aggregate securely.

    `codec` says how payloads are laid out, `openings` which sums an earlier process has opened.
    """

    settings: SecureAggregationSettings
    codec: PayloadCodec
    openings: OpenedSums = field(default_factory=OpenedSums)


def make_server_app(
    *,
    settings: FederationSettings,
    participation: Participation,
    start: Start,
    evaluate: Callable[[ArrayRecord], Metrics],
    on_round: Callable[[RoundResult], None],
    book: ClientLedgers | None,
    steps: int | None = None,
    stop_when_withdrawn: bool = False,
    on_stop: Callable[[str], None] = logger.info,
    patience: float = 60.0,
    secure: SecureAggregation | None = None,
    evaluation: ClientEvaluation | None = None,
) -> ServerApp:
    """Return the ServerApp that runs the whole federation.

    Args:
        settings: rounds, strategy and weighting.
        participation: the schedule of who trains when.
        start: first arrays and first round.
        evaluate: metrics of a global model on the server's public test set.
        on_round: called at the end of every round, in the server's thread.
        book: receives the clients' privacy statements; None without privacy.
        steps: local steps of a round, to tell who took fewer.
        stop_when_withdrawn: end after the round in which the first client withdrew.
        on_stop: called with the reason when the federation ends before its last round because
            clients withdrew.
        patience: seconds to wait for all nodes, and for the replies of a round.
        secure: secure aggregation; None: the server sees every update.
        evaluation: evaluation on clients' held-out examples; None: there is none.

    The app raises FederationError when not every node is there, when clients of a round failed and
    fewer than `settings.min_participants` updates came, or when a secure sum could not be opened
    (`on_abort: raise`).
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        helpers = 0 if secure is None else secure.settings.helpers
        roll = whole_roll(grid, participation.num_clients, helpers, patience=patience)
        roster = roll.clients
        strategy = FedAvg(
            settings=settings,
            participation=participation,
            roster=roster,
            book=book,
            steps=steps,
            withdrawn=start.withdrawn,
            clip_norms=start.clip_norms,
            averaging=None if secure is None else _averaging(secure, roll),
            evaluation=evaluation,
        )
        strategy.summary()
        arrays = start.arrays
        for round_number in range(start.first_round, settings.rounds + 1):
            reason = _reason_to_stop(strategy.withdrawn, len(roster), stop_when_withdrawn)
            if reason is not None:
                on_stop(reason)
                return
            result = run_round(strategy, grid, round_number, arrays, evaluate, book)
            if result.aborted is None:
                check_participants(result, settings.min_participants)
            elif secure is not None and secure.settings.on_abort == "raise":
                raise RoundError(_given_up(result), result)
            arrays = result.arrays
            on_round(result)

    return app


def check_participants(result: RoundResult, least: int) -> None:
    """Check that a round may count.

    Raises:
        RoundError: clients failed, and fewer than `least` updates came.
    """
    if result.failed and len(result.participants) < least:
        raise RoundError(_too_few(result, least), result)


def _reason_to_stop(withdrawn: set[int], num_clients: int, stop_when_withdrawn: bool) -> str | None:
    if len(withdrawn) == num_clients:
        return "every client has spent its privacy budget"
    if withdrawn and stop_when_withdrawn:
        names = ", ".join(str(client) for client in sorted(withdrawn)[:10])
        return f"the privacy budget of client {names} is spent (on_exhausted: stop)"
    return None


def _averaging(secure: SecureAggregation, roll: Roll) -> SecureAggregator:
    return SecureAggregator(
        settings=secure.settings,
        codec=secure.codec,
        clients={client: node for node, client in roll.clients.items()},
        helpers={helper: node for node, helper in roll.helpers.items()},
        openings=secure.openings,
    )


def run_round(
    strategy: FedAvg,
    grid: Grid,
    round_number: int,
    arrays: ArrayRecord,
    evaluate: Callable[[ArrayRecord], Metrics],
    book: ClientLedgers | None,
) -> RoundResult:
    """Run one round from `arrays` and return its result; without an update they stay."""
    started, timeline = time.perf_counter(), Timeline()
    with timeline.part("sample"):
        requests = strategy.configure_train(round_number, arrays, ConfigRecord(), grid)
    with timeline.part("aggregate"):
        with timeline.part("train"):
            replies = grid.send_and_receive(requests, timeout=_LONG)
        replies = timeline.waiting("train", replies)
        new_arrays, _ = strategy.aggregate_train(round_number, replies)
    outcome = strategy.outcome
    if new_arrays is None:
        new_arrays = arrays
    with timeline.part("evaluate"):
        metrics = evaluate(new_arrays)
        asked = strategy.configure_evaluate(round_number, new_arrays, ConfigRecord(), grid)
        if asked := list(asked):
            strategy.aggregate_evaluate(round_number, grid.send_and_receive(asked, timeout=_LONG))
    with timeline.part("account"):
        epsilon = None if book is None else _largest_epsilon(book, outcome.failed)
    return RoundResult(
        round_number=round_number,
        arrays=new_arrays,
        metrics=metrics,
        participants=tuple(outcome.participants),
        failed=tuple(outcome.failed),
        withdrawn=tuple(outcome.withdrawn),
        shortened=dict(sorted(outcome.shortened.items())),
        seconds=time.perf_counter() - started,
        epsilon_max=epsilon,
        timeline=timeline.seconds,
        clip_norms=dict(sorted(strategy.clip_norms.items())),
        aborted=outcome.aborted,
        retried=outcome.retried,
        clipped=outcome.clipped,
        clipped_metrics=outcome.clipped_metrics,
        client_metrics=outcome.metrics,
        evaluated=strategy.evaluated,
    )


def _largest_epsilon(book: ClientLedgers, failed: Iterable[Failure]) -> float | None:
    for failure in failed:
        book.look_up(failure.client)
    return book.epsilon_max()


def _too_few(result: RoundResult, least: int) -> str:
    first, failed, came = result.failed[0], len(result.failed), len(result.participants)
    what = f"{failed} clients failed" if came else f"every client failed ({failed})"
    return (
        f"round {result.round_number}: {what} and {came} of at least {least} updates came "
        f"(federation.min_participants); client {first.client}: {first.reason}"
    )


def _given_up(result: RoundResult) -> str:
    return (
        f"round {result.round_number} was given up (secure_aggregation.on_abort: raise): "
        f"{result.aborted}"
    )
