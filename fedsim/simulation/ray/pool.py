"""Pool of the Ray engine's workers: the server sends requests and replaces dead workers.

A worker that dies is replaced by a new process for the same clients, with their last recorded
states. Requests that the dead worker left unanswered are sent again. A client that was already
charged for the round finds the request in the ledger and gives the same answer at no cost.

A call to a worker contains whole blocks, that is, clients that train together on stacked tensors.
Fast blocks share a call, because a call and its ledger write take as long as a small client's
training. Replies stream back during the call, so the server aggregates while clients train.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ray
from flwr.app import Message
from ray.exceptions import RayError, RayTaskError

from fedsim.core.plugin_errors import error_text
from fedsim.simulation.engine import FIRST_NODE, NodeContexts, failure, failure_reason
from fedsim.simulation.ray.host import PackedRequest
from fedsim.simulation.ray.session import FastPickle

logger = logging.getLogger(__name__)

ActorFactory = Callable[[NodeContexts], Any]

_MAX_OPEN_CALLS = 2  # per worker: one in execution, and the next, so that the worker never waits
_TARGET_CALL_SECONDS = 1.0
_MAX_REQUESTS_PER_CALL = 256
_MAX_BLOCK_ATTEMPTS = 2  # for a block whose worker dies; then its clients are asked one by one
_MAX_ATTEMPTS = 3  # for one request whose worker dies
_MAX_DEATHS_IN_A_ROW = 4  # per worker, without a reply in between
_POLL_SECONDS = 2.0  # between checks of workers that do not start


@dataclass
class _Job:
    request: PackedRequest
    block: int  # number of the first client of the request's block
    attempts: int = 0

    @property
    def kind(self) -> str:
        return self.request.envelope.metadata.message_type


@dataclass
class Worker:
    """A set of clients that share a process; if the process dies, a new process replaces it.

    Args:
        number: the number of the worker, as it appears in error messages.
        contexts: the last recorded contexts of the worker's clients.
        make_actor: function that starts a process for the clients of the given contexts, and
            returns the handle of the process's Ray actor.
    """

    number: int
    contexts: NodeContexts
    make_actor: ActorFactory
    actor: Any = None
    queue: deque[_Job] = field(default_factory=deque)
    jobs_by_call: dict[Any, deque[_Job]] = field(default_factory=dict)  # in order of execution
    shared: Mapping[str, Any] = field(default_factory=dict)  # records of the requests, by key
    group: dict[str, int] = field(default_factory=dict)  # requests in a call, by kind of message
    deaths: int = 0
    startup_call: Any = None  # reference to the first reply of the process
    start_seconds: float = 0.0  # monotonic time of the last start
    is_up: bool = False

    def start(self) -> None:
        """Start a process for the worker; end the earlier process first."""
        self.stop()
        self.actor = self.make_actor(self.contexts)
        self.startup_call = self.actor.versions.remote()
        self.start_seconds = time.monotonic()
        self.is_up = False

    def stop(self) -> None:
        """End the worker's process if it lives, because a client must not run in two processes."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
            self.actor = None

    def open_calls(self) -> list[Any]:
        """Send the worker's next requests; return its unanswered calls, for which the pool waits.

        A process that is still starting gets no requests, because its replies could come after the
        round. If requests wait for this process, the result is the call that ends when the process
        has started.
        """
        if not self.is_up:
            return [self.startup_call] if self.queue else []
        while self.queue and len(self.jobs_by_call) < _MAX_OPEN_CALLS:
            jobs = self._next_jobs()
            requests = [job.request for job in jobs]
            shared = {key: self.shared[key] for p in requests for key in p.shared.values()}
            answer = self.actor.answer.options(num_returns="streaming")
            self.jobs_by_call[answer.remote(FastPickle(requests), shared)] = jobs
        return list(self.jobs_by_call)

    def pop_answered(self, call: Any, number: int, seconds: float) -> list[_Job]:
        """Remove the requests that were just answered from their call, and return them.

        The time that the answers took sets the number of requests in later calls.

        Args:
            call: an unanswered call; the worker forgets the call when all requests of the call
                are answered.
            number: the number of requests that have just been answered, ≥ 1.
            seconds: the time that these answers took, in seconds.
        """
        jobs = [self.jobs_by_call[call].popleft() for _ in range(number)]
        if not self.jobs_by_call[call]:
            del self.jobs_by_call[call]
        self.deaths = 0
        seconds_each = max(seconds / number, _TARGET_CALL_SECONDS / _MAX_REQUESTS_PER_CALL)
        self.group[jobs[0].kind] = max(1, int(_TARGET_CALL_SECONDS / seconds_each))
        return jobs

    def _next_jobs(self) -> deque[_Job]:
        """Take the next blocks of one kind for a call; a block whose worker died goes alone."""
        jobs = self._next_block()
        kind = jobs[0].kind
        most = 1 if jobs[0].attempts else self.group.get(kind, 1)
        while len(jobs) < most and self.queue:
            if self.queue[0].kind != kind or self.queue[0].attempts:
                break
            jobs += self._next_block()
        return jobs

    def _next_block(self) -> deque[_Job]:
        """Take the requests of the next block; after two deaths, only the block's next request."""
        jobs = deque([self.queue.popleft()])
        first = jobs[0]
        same = (first.kind, first.block, first.attempts)
        while self.queue and first.attempts < _MAX_BLOCK_ATTEMPTS:
            if (self.queue[0].kind, self.queue[0].block, self.queue[0].attempts) != same:
                break
            jobs.append(self.queue.popleft())
        return jobs

    def requeue(self, jobs: Sequence[_Job]) -> None:
        """Put requests that a dead process left unanswered at the head of the queue.

        They are sent again in one call for each block (clients that train together), because any
        block may have caused the death.
        """
        for job in jobs:
            job.attempts += 1
        self.queue.extendleft(reversed(jobs))

    def fail_requests(self, reason: str) -> Iterator[Message]:
        """Take the queued requests and yield an error with the given reason for each."""
        while self.queue:
            yield failure(self.queue.popleft().request.envelope, reason)

    def clear_requests(self) -> None:
        """Drop all requests that are queued or not yet answered."""
        self.queue.clear()
        self.jobs_by_call.clear()
        self.shared = {}


class WorkerPool:
    """Pool that sends each request to the worker of its client and yields the replies.

    Args:
        workers: the started workers.
        patience: the longest time to replace a dead worker, in seconds. After that, requests to the
            worker's clients fail until the cluster has room for a process.
    """

    def __init__(self, workers: Sequence[Worker], *, patience: float) -> None:
        self._workers = list(workers)
        self._patience = patience
        self._workers_by_node = {node: worker for worker in workers for node in worker.contexts}

    def send_and_receive(
        self,
        requests: Iterable[tuple[PackedRequest, int]],
        shared: Mapping[str, Any],
        *,
        timeout: float | None,
    ) -> Iterator[Message]:
        """Yield one reply for each request, in the order in which replies arrive.

        If a client's worker cannot be kept alive, the reply is an error. After a timeout the
        missing clients are logged.

        Args:
            requests: pairs of a request and the first client of its block (clients that train
                together on stacked tensors). The requests of a block follow one another.
            shared: Ray references to the records that several requests share, by key.
            timeout: the longest time to wait for all replies, in seconds; None for no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self._workers:
            worker.shared = shared
        for request, block in requests:
            self._workers_by_node[request.node].queue.append(_Job(request, block))
        try:
            while owners := {call: w for w in self._workers for call in w.open_calls()}:
                left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    self._log_missing(timeout)
                    return
                ready, _ = ray.wait(list(owners), timeout=min(left, _POLL_SECONDS))
                if ready:
                    yield from self._collect(owners[ready[0]], ready[0])
                    continue
                for worker in self._workers:
                    waited = time.monotonic() - worker.start_seconds
                    if not worker.is_up and waited > self._patience:
                        yield from worker.fail_requests(
                            f"its worker {worker.number} died and there was no room for another one"
                        )
        finally:
            for worker in self._workers:
                worker.clear_requests()

    def _collect(self, worker: Worker, ready: Any) -> Iterator[Message]:
        """Yield the next replies of a call, or mark a worker as started."""
        try:
            if ready == worker.startup_call:
                ray.get(ready)
                worker.is_up = True
                return
            chunk: Any = ray.get(next(ready))
        except RayTaskError as error:  # the worker lives, but could not read a request
            jobs = worker.jobs_by_call.pop(ready)
            if len(jobs) == 1:
                request = jobs[0].request
                yield failure(request.envelope, failure_reason(request.node, error.cause))
            else:
                worker.requeue(jobs)
        except RayError as error:
            yield from self._replace(worker, error_text(error))
        else:
            jobs = worker.pop_answered(ready, len(chunk.replies), chunk.seconds)
            for job, reply in zip(jobs, chunk.replies, strict=True):
                worker.contexts[job.request.node].state = reply.state
            for reply in chunk.replies:
                yield reply.unpack()

    def _replace(self, worker: Worker, reason: str) -> Iterator[Message]:
        """Start a new process for a worker; yield errors for requests that had too many deaths."""
        worker.deaths += 1
        calls = list(worker.jobs_by_call.values())
        worker.jobs_by_call.clear()
        for jobs in reversed(calls[1:]):
            worker.queue.extendleft(reversed(jobs))
        first_jobs = calls[0] if calls else []
        worker.requeue(first_jobs)
        logger.warning(
            "worker %d died and is replaced; its clients resume from their recorded states: %s",
            worker.number,
            reason,
        )
        worker.start()
        if worker.deaths > _MAX_DEATHS_IN_A_ROW:
            message = f"its worker died {worker.deaths} times without an answer: {reason}"
            worker.deaths = 0
            yield from worker.fail_requests(message)
        elif first_jobs and first_jobs[0].attempts >= _MAX_ATTEMPTS:
            message = f"its worker died {_MAX_ATTEMPTS} times while answering: {reason}"
            yield failure(worker.queue.popleft().request.envelope, message)

    def _log_missing(self, timeout: float | None) -> None:
        jobs = [job for w in self._workers for job in (*chain(*w.jobs_by_call.values()), *w.queue)]
        clients = sorted(job.request.node - FIRST_NODE for job in jobs)
        logger.warning("no reply within %s s from clients %s", timeout, clients)
