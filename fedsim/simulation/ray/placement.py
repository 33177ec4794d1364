"""Placement of clients on workers; a client stays with its data and state."""

import heapq
from collections.abc import Sequence


def longest_first(work: Sequence[float], workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each worker, balanced by their expected work.

    Clients are placed in descending order of work, each on the worker with the least work so far.
    The busiest of m workers then has at most 4/3 - 1/(3 m) times the optimum.

    Args:
        work: expected work of each client, by its number, in any unit.
        workers: number of workers ≥ 1; workers without a client are left out.

    Returns:
        The clients of each worker, in ascending order; a function of the arguments alone.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies", Theorem 2.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    shares: list[list[int]] = [[] for _ in range(min(workers, len(work)))]
    least = [(0.0, worker) for worker in range(len(shares))]
    for client in sorted(range(len(work)), key=lambda client: (-work[client], client)):
        load, worker = heapq.heappop(least)
        shares[worker].append(client)
        heapq.heappush(least, (load + work[client], worker))
    return tuple(tuple(sorted(share)) for share in shares)
