"""Placement of ranges of clients on workers; a client stays with its data and state."""

import heapq
from collections.abc import Sequence


def place_ranges(
    ranges: Sequence[Sequence[int]], work: Sequence[float], workers: int
) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each worker; clients of one range are on one worker.

    Args:
        ranges: clients that stay together, ascending.
        work: expected work of each client, by its number, in any unit.
        workers: number of workers ≥ 1; workers without a range are left out.
    """
    shares = longest_first([sum(work[client] for client in own) for own in ranges], workers)
    return tuple(tuple(client for part in share for client in ranges[part]) for share in shares)


def longest_first(work: Sequence[float], workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the jobs of each worker, balanced by their expected work.

    Jobs are placed in descending order of work, each on the worker with the least work so far.
    The busiest of m workers then has at most 4/3 - 1/(3 m) times the optimum.

    Args:
        work: expected work of each job, by its number, in any unit.
        workers: number of workers ≥ 1; workers without a job are left out.

    Returns:
        The jobs of each worker, in ascending order; a function of the arguments alone.

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies", Theorem 2.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    shares: list[list[int]] = [[] for _ in range(min(workers, len(work)))]
    least = [(0.0, worker) for worker in range(len(shares))]
    for job in sorted(range(len(work)), key=lambda job: (-work[job], job)):
        load, worker = heapq.heappop(least)
        shares[worker].append(job)
        heapq.heappush(least, (load + work[job], worker))
    return tuple(tuple(sorted(share)) for share in shares)
