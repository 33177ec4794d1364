"""The workers of the Ray engine, seen from the server: who has what to do, and who died.

A worker that dies is replaced by one that gets the same clients with their last recorded states.
What it had not answered is asked again: a client that was charged already recognises the request in
the durable ledger and gives the same answer at no cost.

Quick clients are asked in groups: a call to a worker, and the charge that it waits for, cost as
much as a small client's training. What is answered streams back while the call goes on, so that the
server aggregates beside training.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ray
from flwr.app import Context, Message
from ray.exceptions import RayError, RayTaskError

from fedsim.simulation.ray.fast_pickle import Packed
from fedsim.simulation.ray.host import Parcel
from fedsim.simulation.virtual_grid import failure

logger = logging.getLogger(__name__)

Hire = Callable[[Sequence[Context]], Any]

_AHEAD = 2  # calls to a worker: one to work on, one so that it never waits for the next
_CALL = 1.0  # seconds that a call should take
_MOST = 256  # requests in a call
_ATTEMPTS = 3  # of one request whose worker dies over it
_DEATHS_IN_A_ROW = 4  # of one worker that never answered in between
_LOOK = 2.0  # seconds between looks at workers that do not start


@dataclass
class _Job:
    parcel: Parcel
    attempts: int = 0

    @property
    def kind(self) -> str:
        return self.parcel.envelope.metadata.message_type


@dataclass
class Worker:
    """A worker process and its clients; the process may be another one after a death.

    Args:
        number: names the worker in messages.
        contexts: its clients' contexts as last recorded.
        hire: starts a process with the given contexts and returns its handle.
    """

    number: int
    contexts: Sequence[Context]
    hire: Hire
    actor: Any = None
    waiting: deque[_Job] = field(default_factory=deque)
    running: dict[Any, deque[_Job]] = field(default_factory=dict)  # by call, in order of execution
    shared: Mapping[str, Any] = field(default_factory=dict)  # records of the requests, by key
    group: dict[str, int] = field(default_factory=dict)  # requests in a call, by kind of message
    deaths: int = 0
    greeting: Any = None  # reference to the first answer of the process
    started: float = 0.0
    up: bool = False

    def start(self) -> None:
        """Start a process, in place of the one before if there was one."""
        self.dismiss()
        self.actor = self.hire(self.contexts)
        self.greeting = self.actor.versions.remote()
        self.started = time.monotonic()
        self.up = False

    def dismiss(self) -> None:
        """End the process, if it lives; a client must not answer twice at the same time."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
            self.actor = None

    def expected(self) -> list[Any]:
        """Give the process its next requests and return the calls, or the greeting, to wait for.

        A process that has not come up is given none: it would answer them, much later, to nobody.
        """
        if not self.up:
            return [self.greeting] if self.waiting else []
        while self.waiting and len(self.running) < _AHEAD:
            jobs = self._next_jobs()
            parcels = [job.parcel for job in jobs]
            shared = {key: self.shared[key] for p in parcels for key in p.shared.values()}
            answer = self.actor.answer.options(num_returns="streaming")
            self.running[answer.remote(Packed(parcels), shared)] = jobs
        return list(self.running)

    def answered(self, call: Any, number: int, seconds: float) -> list[_Job]:
        """Take the next answered requests of a call, and learn how many of their kind to ask.

        Args:
            call: one of `running`; when all of it is answered, it is no longer expected.
            number: how many were answered now, at least one.
            seconds: what that took.
        """
        jobs = [self.running[call].popleft() for _ in range(number)]
        if not self.running[call]:
            del self.running[call]
        self.deaths = 0
        each = max(seconds / number, _CALL / _MOST)
        self.group[jobs[0].kind] = max(1, int(_CALL / each))
        return jobs

    def _next_jobs(self) -> deque[_Job]:
        """Take the next requests of one kind; one that was there when a worker died goes alone."""
        jobs = deque([self.waiting.popleft()])
        kind = jobs[0].kind
        most = 1 if jobs[0].attempts else self.group.get(kind, 1)
        while len(jobs) < most and self.waiting:
            if self.waiting[0].kind != kind or self.waiting[0].attempts:
                break
            jobs.append(self.waiting.popleft())
        return jobs

    def ask_again(self, jobs: Sequence[_Job]) -> None:
        """Put first what was being worked on, one by one: it may be to blame."""
        for job in jobs:
            job.attempts += 1
        self.waiting.extendleft(reversed(jobs))

    def forget(self) -> None:
        """Drop what is still asked of the process."""
        self.waiting.clear()
        self.running.clear()
        self.shared = {}


class WorkerPool:
    """Sends requests to the workers that hold their clients and yields the replies as they come.

    Args:
        workers: started ones.
        patience: seconds in which a worker that died must be replaced; a cluster that lost a
            machine may have no room. Until there is, requests to its clients fail at once.
    """

    def __init__(self, workers: Sequence[Worker], *, patience: float) -> None:
        self._workers = list(workers)
        self._patience = patience
        self._home = {
            context.node_id: (worker, context) for worker in workers for context in worker.contexts
        }

    def answers(
        self, parcels: Iterable[Parcel], shared: Mapping[str, Any], *, timeout: float | None
    ) -> Iterator[Message]:
        """Yield one reply for each parcel, an error for a client that could not be brought to one.

        After `timeout` seconds nothing more is yielded; who is missing is logged.

        Args:
            parcels: the requests.
            shared: references to the records that they share, by key.
            timeout: in seconds; None: as long as it takes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self._workers:
            worker.shared = shared
        for parcel in parcels:
            self._home[parcel.node][0].waiting.append(_Job(parcel))
        try:
            while owners := self._owners():
                left = _LOOK if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    self._log_missing(timeout)
                    return
                ready = _first_ready(owners, within=min(left, _LOOK))
                if ready is not None:
                    yield from self._collect(owners[ready], ready)
                    continue
                for worker in self._workers:
                    if not worker.up and time.monotonic() - worker.started > self._patience:
                        yield from self._give_up(worker)
        finally:
            for worker in self._workers:
                worker.forget()

    def _owners(self) -> dict[Any, Worker]:
        """Keep every worker busy and return whose answers are expected."""
        return {expected: worker for worker in self._workers for expected in worker.expected()}

    def _collect(self, worker: Worker, ready: Any) -> Iterator[Message]:
        """Yield what there is of a call's answers, or note that a worker came up."""
        try:
            if ready == worker.greeting:
                ray.get(ready)
                worker.up = True
                return
            found: Any = ray.get(next(ready))
        except RayTaskError as error:  # the worker lives: a request itself could not be read
            jobs = worker.running.pop(ready)
            if len(jobs) == 1:
                reason = f"{type(error.cause).__name__}: {error.cause}"
                yield failure(jobs[0].parcel.envelope, reason)
            else:
                worker.ask_again(jobs)
        except RayError as error:
            yield from self._replace(worker, _in_one_line(error))
        else:
            jobs = worker.answered(ready, len(found.answers), found.seconds)
            for job, answer in zip(jobs, found.answers, strict=True):
                self._home[job.parcel.node][1].state = answer.state
            for answer in found.answers:
                yield answer.reply()

    def _replace(self, worker: Worker, reason: str) -> Iterator[Message]:
        """Start a new process; give up on requests that keep killing theirs."""
        worker.deaths += 1
        calls = list(worker.running.values())
        worker.running.clear()
        for jobs in reversed(calls[1:]):
            worker.waiting.extendleft(reversed(jobs))
        at_work = calls[0] if calls else []
        worker.ask_again(at_work)
        logger.warning(
            "worker %d died and is replaced; its clients go on from their recorded states: %s",
            worker.number,
            reason,
        )
        worker.start()
        if worker.deaths > _DEATHS_IN_A_ROW:
            what = f"its worker died {worker.deaths} times without an answer: {reason}"
            worker.deaths = 0
            while worker.waiting:
                yield failure(worker.waiting.popleft().parcel.envelope, what)
        elif at_work and at_work[0].attempts >= _ATTEMPTS:
            what = f"its worker died {_ATTEMPTS} times while answering: {reason}"
            yield failure(worker.waiting.popleft().parcel.envelope, what)

    def _give_up(self, worker: Worker) -> Iterator[Message]:
        """Answer for the clients of a worker for which there is no room."""
        what = f"its worker {worker.number} died and there was no room for another one"
        while worker.waiting:
            yield failure(worker.waiting.popleft().parcel.envelope, what)

    def _log_missing(self, timeout: float | None) -> None:
        jobs = [job for w in self._workers for job in (*chain(*w.running.values()), *w.waiting)]
        nodes = sorted(self._home[job.parcel.node][1].node_config["partition-id"] for job in jobs)
        logger.warning("no reply within %s s from clients %s", timeout, nodes)


def _first_ready(owners: dict[Any, Worker], *, within: float) -> Any | None:
    """Return what has something for its owner, or None if nothing had within so many seconds."""
    ready, _ = ray.wait(list(owners), num_returns=1, timeout=within)
    return ready[0] if ready else None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
