"""The workers of the Ray engine, seen from the server: who has what to do, and who died.

A worker that dies is replaced by one that gets the same clients with their last recorded states.
What it had not answered is asked again: a client that was charged already recognises the request in
the durable ledger and gives the same answer at no cost.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from flwr.app import Context, Message
from ray.exceptions import RayError, RayTaskError

from fedsim.simulation.ray_host import Answer, Parcel
from fedsim.simulation.virtual_grid import failure

logger = logging.getLogger(__name__)

Hire = Callable[[Sequence[Context]], Any]

_AHEAD = 2  # requests at a worker: one to work on, one so that it never waits for the next
_ATTEMPTS = 3  # of one request whose worker dies over it
_DEATHS_IN_A_ROW = 4  # of one worker that never answered in between
_LOOK = 2.0  # seconds between looks at workers that do not start


@dataclass
class _Job:
    parcel: Parcel
    attempts: int = 0


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
    running: dict[Any, _Job] = field(default_factory=dict)  # by reference, in order of execution
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
        """Give the process its next requests and return the references to wait for.

        A process that has not come up is given none: it would answer them, much later, to nobody.
        """
        if not self.up:
            return [self.greeting] if self.waiting else []
        while self.waiting and len(self.running) < _AHEAD:
            job = self.waiting.popleft()
            self.running[self.actor.answer.remote(job.parcel)] = job
        return list(self.running)

    def forget(self) -> None:
        """Drop what is still asked of the process."""
        self.waiting.clear()
        self.running.clear()


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

    def answers(self, parcels: Iterable[Parcel], *, timeout: float | None) -> Iterator[Message]:
        """Yield one reply for each parcel, an error for a client that could not be brought to one.

        After `timeout` seconds nothing more is yielded; who is missing is logged.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for parcel in parcels:
            self._home[parcel.node][0].waiting.append(_Job(parcel))
        try:
            while owners := self._owners():
                reference = _first_done(owners)
                if reference is not None:
                    yield from self._collect(owners[reference], reference)
                    continue
                if deadline is not None and time.monotonic() >= deadline:
                    self._log_missing(timeout)
                    return
                for worker in self._workers:
                    if not worker.up and time.monotonic() - worker.started > self._patience:
                        yield from self._give_up(worker)
        finally:
            for worker in self._workers:
                worker.forget()

    def _owners(self) -> dict[Any, Worker]:
        """Keep every worker busy and return whose answers are expected."""
        return {reference: worker for worker in self._workers for reference in worker.expected()}

    def _collect(self, worker: Worker, reference: Any) -> Iterator[Message]:
        try:
            answer: Answer | dict[str, str] = ray.get(reference)
        except RayTaskError as error:  # the worker lives: the request itself could not be read
            job = worker.running.pop(reference)
            yield failure(job.parcel.envelope, f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            yield from self._replace(worker, _in_one_line(error))
        else:
            if not isinstance(answer, Answer):
                worker.up = True
                return
            job = worker.running.pop(reference)
            worker.deaths = 0
            self._home[job.parcel.node][1].state = answer.state
            yield answer.reply

    def _replace(self, worker: Worker, reason: str) -> Iterator[Message]:
        """Start a new process; give up on requests that keep killing theirs."""
        worker.deaths += 1
        jobs = list(worker.running.values())
        worker.running.clear()
        worker.waiting.extendleft(reversed(jobs))
        for job in jobs[:1]:  # the one that was being worked on
            job.attempts += 1
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
        elif jobs and jobs[0].attempts >= _ATTEMPTS:
            what = f"its worker died {_ATTEMPTS} times while answering: {reason}"
            yield failure(worker.waiting.popleft().parcel.envelope, what)

    def _give_up(self, worker: Worker) -> Iterator[Message]:
        """Answer for the clients of a worker for which there is no room."""
        what = f"its worker {worker.number} died and there was no room for another one"
        while worker.waiting:
            yield failure(worker.waiting.popleft().parcel.envelope, what)

    def _log_missing(self, timeout: float | None) -> None:
        jobs = [job for w in self._workers for job in (*w.running.values(), *w.waiting)]
        nodes = sorted(self._home[job.parcel.node][1].node_config["partition-id"] for job in jobs)
        logger.warning("no reply within %s s from clients %s", timeout, nodes)


def _first_done(owners: dict[Any, Worker]) -> Any | None:
    """Return a reference that is done, or None if none was within a moment."""
    done, _ = ray.wait(list(owners), num_returns=1, timeout=_LOOK)
    return done[0] if done else None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
