"""Which worker gets which clients, when a client stays where its data and its state are."""

import heapq
from collections.abc import Sequence


def longest_first(work: Sequence[float], workers: int) -> tuple[tuple[int, ...], ...]:
    """Divide clients among workers so that none has much more to do than the others.

    The client with most work comes first, and each goes to the worker with least so far.
    The busiest worker then has at most 4/3 - 1/(3 m) of the least that is possible with m workers.

    Args:
        work: expected work of each client, by its number, in any unit.
        workers: number of workers; those that would get no client are left out.

    Returns:
        The clients of each worker, in ascending order. It depends on the arguments alone.

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
