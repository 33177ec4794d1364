"""The server side as a Flower ServerApp.

The app waits for every client, learns who is who, and then runs the rounds itself through the hooks
of a Flower `Strategy`. It does not use `Strategy.start`, which starts at round 1, offers no hook at
the end of a round and loses everything when one raises.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsim.server.participation import Participation
from fedsim.server.privacy_book import PrivacyBook
from fedsim.server.protocol import partition_of, roll_call_message
from fedsim.server.settings import FederationSettings
from fedsim.server.strategies import Failure, FedAvg
from fedsim.server.timeline import Timeline

Metrics = Mapping[str, float]


class FederationError(RuntimeError):
    """The federation cannot go on; the message says why."""


@dataclass(frozen=True)
class RoundResult:
    """One finished round: the new global model and what is said about it.

    `metrics` are those of the global model on the server's test set; `epsilon_max` is the largest
    cumulative ε of any client, None without privacy. `timeline` divides `seconds` by `PARTS`.
    """

    round_number: int
    arrays: ArrayRecord
    metrics: Metrics
    participants: tuple[int, ...]
    failed: tuple[Failure, ...]
    withdrawn: tuple[int, ...]
    seconds: float
    epsilon_max: float | None
    timeline: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """Where a federation starts: before round `first_round`, with these arrays."""

    arrays: ArrayRecord
    first_round: int = 1


def make_server_app(
    *,
    settings: FederationSettings,
    participation: Participation,
    start: Start,
    evaluate: Callable[[ArrayRecord], Metrics],
    on_round: Callable[[RoundResult], None],
    book: PrivacyBook | None,
    patience: float = 60.0,
) -> ServerApp:
    """Return the ServerApp that runs the whole federation.

    Args:
        settings: rounds, strategy and weighting.
        participation: the schedule of who trains when.
        start: first arrays and first round.
        evaluate: metrics of a global model on the server's public test set.
        on_round: called at the end of every round, in the server's thread.
        book: receives the clients' privacy statements; None without privacy.
        patience: seconds to wait for all nodes, and for the replies of a round.

    The app raises FederationError when not every client is there, or when every client of a round
    failed.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        roster = call_roll(grid, participation.num_clients, patience=patience)
        strategy = FedAvg(settings=settings, participation=participation, roster=roster, book=book)
        strategy.summary()
        arrays = start.arrays
        for round_number in range(start.first_round, settings.rounds + 1):
            result = run_round(strategy, grid, round_number, arrays, evaluate, book)
            arrays = result.arrays
            on_round(result)

    return app


def call_roll(grid: Grid, num_clients: int, *, patience: float) -> dict[int, int]:
    """Wait for `num_clients` nodes and return the client that each one holds, by node id.

    Waiting matters: Flower's simulation starts the server before its nodes exist, and a round with
    the nodes that happen to be there would silently change who takes part.

    Raises:
        FederationError: fewer nodes than clients within `patience` seconds, or two nodes hold the
            same client.
    """
    nodes = _wait_for_nodes(grid, num_clients, patience)
    replies = grid.send_and_receive([roll_call_message(node) for node in nodes], timeout=patience)
    roster = {reply.metadata.src_node_id: partition_of(reply) for reply in replies}
    if sorted(roster.values()) != list(range(num_clients)):
        raise FederationError(
            f"expected one node for each of the clients 0..{num_clients - 1}, "
            f"got clients {sorted(roster.values())}"
        )
    return roster


def run_round(
    strategy: FedAvg,
    grid: Grid,
    round_number: int,
    arrays: ArrayRecord,
    evaluate: Callable[[ArrayRecord], Metrics],
    book: PrivacyBook | None,
) -> RoundResult:
    """Run one round from `arrays` and return its result.

    Raises:
        FederationError: every client of the round failed.
    """
    started, timeline = time.perf_counter(), Timeline()
    with timeline.part("sample"):
        requests = strategy.configure_train(round_number, arrays, ConfigRecord(), grid)
    with timeline.part("aggregate"):
        # A generous limit: it only has to end a run whose clients died silently.
        with timeline.part("train"):
            replies = grid.send_and_receive(requests, timeout=24 * 3600)
        replies = timeline.waiting("train", replies)
        new_arrays, _ = strategy.aggregate_train(round_number, replies)
    outcome = strategy.outcome
    if new_arrays is None:
        raise FederationError(_all_failed(round_number, outcome.failed))
    with timeline.part("evaluate"):
        metrics = evaluate(new_arrays)
    with timeline.part("account"):
        epsilon = None if book is None else book.epsilon_max()
    return RoundResult(
        round_number=round_number,
        arrays=new_arrays,
        metrics=metrics,
        participants=tuple(outcome.participants),
        failed=tuple(outcome.failed),
        withdrawn=tuple(outcome.withdrawn),
        seconds=time.perf_counter() - started,
        epsilon_max=epsilon,
        timeline=timeline.seconds,
    )


def _wait_for_nodes(grid: Grid, num_clients: int, patience: float) -> list[int]:
    deadline = time.monotonic() + patience
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= num_clients:
            return nodes
        if time.monotonic() > deadline:
            raise FederationError(
                f"only {len(nodes)} of {num_clients} clients connected within {patience:g} s"
            )
        time.sleep(0.05)


def _all_failed(round_number: int, failed: Iterable[Failure]) -> str:
    reasons = list(failed)
    if not reasons:
        return f"round {round_number}: no client took part"
    first = reasons[0]
    return (
        f"round {round_number}: every client failed ({len(reasons)}); "
        f"client {first.client}: {first.reason}"
    )
