"""Many clients of one process answer together: one wait for the disk, and cohorts where they pay.

A group of requests is charged first, all in one append to the ledger; then the clients train, in
cohorts or one after the other, and their replies are handed over one at a time. Whether clients
trained together changes no bit of any answer (`cohort_training` sees to that).
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsim.accountant.ledger.journal import Charge
from fedsim.clients.account import BudgetExhaustedError, PrivacyAccount
from fedsim.clients.app import (
    ClientTask,
    failed_reply,
    finished_reply,
    identity_of,
    make_client_app,
    one_thread,
    partition_of,
    sent,
    taken_steps,
    trained_reply,
)
from fedsim.clients.faults.injection import Fault
from fedsim.clients.training.cohorts import Trainee, train_together
from fedsim.clients.training.local_training import StreamKey
from fedsim.protocol.messages import PrivacyStatement, TrainRequest, Withdrawal

logger = logging.getLogger(__name__)

Request = tuple[Message, Context]

AnswerGroup = Iterable[Message | Exception]
"""Answers that come together; for each, what the client raised instead, if it raised anything."""


@runtime_checkable
class ManyAnswers(Protocol):
    """An app that can answer a group of train requests at once."""

    @property
    def group_size(self) -> int:
        """The most requests in one group."""
        ...

    def answer_many(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the answers to the requests, in their order, together where they come together.

        Those that come together are made as they are read, to be read before the next ones are
        asked for, which may take their time.

        Guarantee: each answer is the one that the client gives alone.
        """
        ...


@dataclass
class Turn:
    """One client's turn in a round: its task and request, and what it is charged."""

    task: ClientTask
    request: TrainRequest
    message: Message
    context: Context
    fault: Fault
    account: PrivacyAccount | None = None
    charge: Charge | None = None
    trained: np.ndarray | None = None
    learnt: float | None = None

    @cached_property
    def trainee(self) -> Trainee:
        """The client as one that trains with others."""
        task = self.task
        key = StreamKey(task.seed, task.client, self.request.round_number)
        steps = taken_steps(task, self.statement, self.fault)
        if task.privacy is None:
            return Trainee(*task.data(), key, steps)
        secure = task.privacy.secure_noise
        return Trainee(*task.data(), key, steps, task.step(self.request), secure)

    @property
    def kind(self) -> Hashable:
        """What clients that train together have in common."""
        task, trainee = self.task, self.trainee
        clipping = None if trainee.step is None else trainee.step.clipping.kind
        shape = (trainee.features.shape[1:], trainee.features.dtype)
        return (id(task.bench), id(task.loss), task.local, len(trainee.steps), clipping, shape)

    @cached_property
    def statement(self) -> PrivacyStatement | None:
        """What the client says of its account once it is charged; None without privacy."""
        if self.account is None or self.task.privacy is None:
            return None
        return self.account.statement(self.task.privacy)


Outcome = Turn | Message | Exception


class ManyClientsApp(ClientApp):
    """The clients of one process as a ClientApp that can also answer many requests at once.

    Args:
        task_of: gives the task of a client by its number.
        cohort_size: the most clients that train together; 1: each alone.
    """

    def __init__(self, task_of: Callable[[int], ClientTask], *, cohort_size: int) -> None:
        super().__init__()
        self._task_of = task_of
        self._alone = make_client_app(task_of)
        self._cohort_size = cohort_size

    @property
    def group_size(self) -> int:
        """The most requests in one group."""
        return max(_CHARGED_TOGETHER, self._cohort_size)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one request."""
        return self._alone(message, context)

    def answer_many(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the answers to the requests, in their order, those of a cohort together.

        Guarantee: every charge of the group is durable before the first of its clients trains; each
        answer is the one that the client gives alone.
        """
        with one_thread():
            turns = deque(_charged([self._turn(*request) for request in requests]))
            cohorts = -(-len(turns) // self._cohort_size)
            while turns:  # of those that trained, nothing is kept
                even = -(-len(turns) // cohorts)
                cohort, cohorts = [turns.popleft() for _ in range(even)], cohorts - 1
                _train_together([turn for turn in cohort if isinstance(turn, Turn)])
                yield from _answers(cohort)

    def _turn(self, message: Message, context: Context) -> "Outcome":
        """Return a client's turn, or the answer of one that takes none."""
        try:
            task = self._task_of(partition_of(context))
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            return error
        try:
            request = TrainRequest.from_message(message)
            fault = task.faults.of(task.client, request.round_number)
            fault.before_charge()
            task.check_examples()
            turn = Turn(task, request, message, context, fault)
            _propose(turn)
        except BudgetExhaustedError as error:
            return Withdrawal(task.client, str(error)).to_message(message)
        except Exception as error:  # noqa: BLE001  likewise
            return _failed(error, task, message)
        return turn


def _failed(error: Exception, task: ClientTask, message: Message) -> Message | Exception:
    try:
        return failed_reply(error, message, private=task.privacy is not None)
    except Exception as unspoken:  # noqa: BLE001  the engine's to tell
        return unspoken


def _propose(turn: Turn) -> None:
    """Ask a client's account what the round would cost; nothing is charged yet."""
    task, request = turn.task, turn.request
    if task.privacy is None:
        return
    turn.account = PrivacyAccount.restore(
        turn.context.state, client=task.client, journal=task.journal
    )
    turn.charge = turn.account.propose(
        task.privacy,
        round_number=request.round_number,
        request=identity_of(task, request),
        steps=task.local.steps,
    )


def _charged(turns: list[Outcome]) -> list[Outcome]:
    """Charge the turns, all in one write; where that fails, nobody trains."""
    pending = [turn for turn in turns if isinstance(turn, Turn) and turn.charge is not None]
    if not pending:
        return turns
    journal = pending[0].task.journal
    try:
        if journal is not None:
            journal.append_all([turn.charge for turn in pending if turn.charge is not None])
    except Exception as error:  # noqa: BLE001  no charge, no training
        return [error if isinstance(turn, Turn) and turn.charge else turn for turn in turns]
    for turn in pending:
        if turn.account is not None and turn.charge is not None:
            turn.account = turn.account.commit(turn.charge, turn.context.state)
    return turns


def _train_together(turns: list[Turn]) -> None:
    """Train clients of one kind together; who is the only one of its kind stays untrained."""
    kinds: dict[Hashable, list[Turn]] = {}
    if len(turns) > 1:
        for turn in turns:
            kinds.setdefault(turn.kind, []).append(turn)
    for cohort in kinds.values():
        if len(cohort) < 2:
            continue
        task, request = cohort[0].task, cohort[0].request
        try:
            task.bench.load(request.arrays)
            trainees = [turn.trainee for turn in cohort]
            together = train_together(task.bench, task.loss, task.local, trainees)
        except Exception as error:  # noqa: BLE001  who is to blame shows when each is alone
            logger.info("a cohort failed, so its clients train alone: %s", type(error).__name__)
            continue
        rows = together.values.cpu().numpy()
        for turn, row, learnt in zip(cohort, rows, together.learnt, strict=True):
            turn.trained, turn.learnt = row, learnt


def _answers(cohort: list[Outcome]) -> Iterator[AnswerGroup]:
    """Yield the answers of a cohort, together but for those who train only now."""
    for done, turns in groupby(cohort, key=_is_done):
        if done:
            yield map(_answer, turns)
        else:
            yield from ([answer] for answer in map(_answer, turns))


def _is_done(turn: Outcome) -> bool:
    """Tell whether nobody has to train any more for an answer."""
    return not isinstance(turn, Turn) or turn.trained is not None


def _answer(turn: Outcome) -> Message | Exception:
    if not isinstance(turn, Turn):
        return turn
    task, request = turn.task, turn.request
    try:
        if turn.trained is None:
            reply = trained_reply(task, request, turn.statement, turn.fault)
        else:
            private = task.privacy is not None
            arrays = task.bench.upload_of(turn.trained, request.arrays, private=private)
            reply = finished_reply(task, arrays, turn.statement, turn.fault, learnt=turn.learnt)
        return sent(task, request, reply, turn.message, turn.context)
    except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
        return _failed(error, task, turn.message)


_CHARGED_TOGETHER = 64
