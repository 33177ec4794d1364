"""The server side as a Flower ServerApp.

The app waits for every client, learns who is who, and then runs the rounds itself through the hooks
of a Flower `Strategy`. It does not use `Strategy.start`, which starts at round 1, offers no hook at
the end of a round and loses everything when one raises.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsim.server.evaluating import ClientEvaluation, Evaluated
from fedsim.server.participation import Participation
from fedsim.server.privacy_book import PrivacyBook
from fedsim.server.protocol import Identity, Withdrawal, identity_of, roll_call_message
from fedsim.server.secure_aggregation.payload import PayloadCodec
from fedsim.server.secure_aggregation.settings import SecureAggregationSettings
from fedsim.server.secure_averaging import SecureAveraging
from fedsim.server.settings import FederationSettings
from fedsim.server.strategies import Failure, FedAvg
from fedsim.server.timeline import Timeline

Metrics = Mapping[str, float]

logger = logging.getLogger(__name__)

# A generous limit: it only has to end a run whose clients died silently.
_LONG = 24 * 3600.0
_GONE = {3, 4, 5}  # Flower's error codes for a message or a node that is no longer there


class FederationError(RuntimeError):
    """The federation cannot go on; the message says why.

    `result` is the round that failed, if it came to one.
    """

    def __init__(self, message: str, result: "RoundResult | None" = None) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class RoundResult:
    """One finished round: the new global model and what is said about it.

    `metrics` are those of the global model on the server's test set; `epsilon_max` is the largest
    cumulative ε of any client, None without privacy. `withdrawn` are the clients that left in this
    round; `shortened` has the steps of those that took fewer than asked. A round without
    participants leaves the model as it was, and so does one that was `aborted`, for that reason;
    `retried` questions of secure aggregation were asked again, and `clipped` values clipped.
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
    evaluated: Evaluated | None = None


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
    """What the server needs to aggregate securely: the settings, and how payloads are laid out."""

    settings: SecureAggregationSettings
    codec: PayloadCodec


def make_server_app(
    *,
    settings: FederationSettings,
    participation: Participation,
    start: Start,
    evaluate: Callable[[ArrayRecord], Metrics],
    on_round: Callable[[RoundResult], None],
    book: PrivacyBook | None,
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
                raise FederationError(_given_up(result), result)
            arrays = result.arrays
            on_round(result)

    return app


def check_participants(result: RoundResult, least: int) -> None:
    """Check that a round may count.

    Raises:
        FederationError: clients failed, and fewer than `least` updates came.
    """
    if result.failed and len(result.participants) < least:
        raise FederationError(_too_few(result, least), result)


def _reason_to_stop(withdrawn: set[int], num_clients: int, stop_when_withdrawn: bool) -> str | None:
    if len(withdrawn) == num_clients:
        return "every client has spent its privacy budget"
    if withdrawn and stop_when_withdrawn:
        names = ", ".join(str(client) for client in sorted(withdrawn)[:10])
        return f"the privacy budget of client {names} is spent (on_exhausted: stop)"
    return None


@dataclass(frozen=True)
class Roll:
    """Who is there: the client, or the helper, that each node is, by node id."""

    clients: Mapping[int, int]
    helpers: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Mapping[int, Identity]) -> "Roll":
        """Divide nodes by what they say they are."""

        def numbers(role: str) -> dict[int, int]:
            return {node: one.number for node, one in nodes.items() if one.role == role}

        return cls(numbers("client"), numbers("helper"))


def call_roll(grid: Grid, num_clients: int, *, patience: float) -> Mapping[int, int]:
    """Wait for `num_clients` nodes and return the client of each, by node id; see `whole_roll`."""
    return whole_roll(grid, num_clients, 0, patience=patience).clients


def whole_roll(grid: Grid, num_clients: int, num_helpers: int, *, patience: float) -> Roll:
    """Wait for all clients and helpers, and return who is who.

    Waiting matters: Flower's simulation starts the server before its nodes exist, and a round with
    the nodes that happen to be there would silently change who takes part. Nodes that are listed
    but gone, such as a SuperNode before its restart, are passed over.

    Raises:
        FederationError: fewer nodes than parties within `patience` seconds, or two nodes are the
            same client or helper.
        ProtocolError: a node answers that it cannot take part, and why.
    """
    deadline = time.monotonic() + patience
    expected = num_clients + num_helpers
    there: dict[int, Identity] = {}
    while len(there) < expected:
        nodes = _wait_for_nodes(grid, expected, deadline, patience)
        replies = grid.send_and_receive(
            [roll_call_message(node) for node in nodes],
            timeout=max(1.0, deadline - time.monotonic()),
        )
        there = {
            reply.metadata.src_node_id: identity_of(reply)
            for reply in replies
            if not (reply.has_error() and reply.error.code in _GONE)
        }
        if len(there) < expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
    roll = Roll.of(there)
    _check_all("client", roll.clients, range(num_clients))
    _check_all("helper", roll.helpers, range(1, num_helpers + 1))
    return roll


def _check_all(role: str, found: Mapping[int, int], wanted: range) -> None:
    if sorted(found.values()) != list(wanted):
        numbers = f"{wanted.start}..{wanted.stop - 1}" if wanted else "none"
        raise FederationError(
            f"expected one node for each of the {role}s {numbers}, "
            f"got {role}s {sorted(found.values())}"
        )


def _averaging(secure: SecureAggregation, roll: Roll) -> SecureAveraging:
    return SecureAveraging(
        settings=secure.settings,
        codec=secure.codec,
        clients={client: node for node, client in roll.clients.items()},
        helpers={helper: node for node, helper in roll.helpers.items()},
    )


def run_round(
    strategy: FedAvg,
    grid: Grid,
    round_number: int,
    arrays: ArrayRecord,
    evaluate: Callable[[ArrayRecord], Metrics],
    book: PrivacyBook | None,
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
        epsilon = None if book is None else book.epsilon_max()
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
        evaluated=strategy.evaluated,
    )


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
