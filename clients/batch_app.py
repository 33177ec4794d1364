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
from fedsim.clients.account import ClientBudgetExhaustedError, PrivacyAccount
from fedsim.clients.app import (
    ClientTask,
    build_reply,
    failed_reply,
    make_client_app,
    one_thread,
    partition_of,
    request_digest,
    seal_reply,
    steps_to_take,
    train_and_reply,
)
from fedsim.clients.faults.injection import Fault
from fedsim.clients.training.cohorts import CohortMember, train_together
from fedsim.clients.training.local_training import StreamKey
from fedsim.protocol.messages import PrivacyStatement, TrainRequest, Withdrawal

logger = logging.getLogger(__name__)

Request = tuple[Message, Context]

AnswerGroup = Iterable[Message | Exception]
"""Answers that come together; for each, what the client raised instead, if it raised anything."""


@runtime_checkable
class BatchAnswers(Protocol):
    """An app that can answer a group of train requests at once."""

    @property
    def group_size(self) -> int:
        """The most requests in one group."""
        ...

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the answers to the requests, in their order, together where they come together.

        Those that come together are made as they are read, to be read before the next ones are
        asked for, which may take their time.

        Guarantee: each answer is the one that the client gives alone.
        """
        ...


@dataclass
class ClientRound:
    """One client's turn in a round: its task and request, and what it is charged."""

    task: ClientTask
    request: TrainRequest
    message: Message
    context: Context
    fault: Fault
    account: PrivacyAccount | None = None
    charge: Charge | None = None
    trained: np.ndarray | None = None
    adapted_clip_norm: float | None = None

    @cached_property
    def trainee(self) -> CohortMember:
        """The client as one that trains with others."""
        task = self.task
        key = StreamKey(task.seed, task.client, self.request.round_number)
        steps = steps_to_take(task, self.statement, self.fault)
        if task.privacy is None:
            return CohortMember(*task.data(), key, steps)
        secure = task.privacy.secure_noise
        return CohortMember(*task.data(), key, steps, task.step(self.request), secure)

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


Outcome = ClientRound | Message | Exception


class BatchClientApp(ClientApp):
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

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
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
                _train_together([turn for turn in cohort if isinstance(turn, ClientRound)])
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
            turn = ClientRound(task, request, message, context, fault)
            _propose(turn)
        except ClientBudgetExhaustedError as error:
            return Withdrawal(task.client, str(error)).to_message(message)
        except Exception as error:  # noqa: BLE001  likewise
            return _failed(error, task, message)
        return turn


def _failed(error: Exception, task: ClientTask, message: Message) -> Message | Exception:
    try:
        return failed_reply(error, message, private=task.privacy is not None)
    except Exception as unspoken:  # noqa: BLE001  the engine's to tell
        return unspoken


def _propose(turn: ClientRound) -> None:
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
        request=request_digest(task, request),
        steps=task.local.steps,
    )


def _charged(turns: list[Outcome]) -> list[Outcome]:
    """Charge the turns, all in one write; where that fails, nobody trains."""
    pending = [turn for turn in turns if isinstance(turn, ClientRound) and turn.charge is not None]
    if not pending:
        return turns
    journal = pending[0].task.journal
    try:
        if journal is not None:
            journal.append_all([turn.charge for turn in pending if turn.charge is not None])
    except Exception as error:  # noqa: BLE001  no charge, no training
        return [error if isinstance(turn, ClientRound) and turn.charge else turn for turn in turns]
    for turn in pending:
        if turn.account is not None and turn.charge is not None:
            turn.account = turn.account.commit(turn.charge, turn.context.state)
    return turns


def _train_together(turns: list[ClientRound]) -> None:
    """Train clients of one kind together; who is the only one of its kind stays untrained."""
    kinds: dict[Hashable, list[ClientRound]] = {}
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
        for turn, row, clip_norm in zip(cohort, rows, together.adapted_clip_norm, strict=True):
            turn.trained, turn.adapted_clip_norm = row, clip_norm


def _answers(cohort: list[Outcome]) -> Iterator[AnswerGroup]:
    """Yield the answers of a cohort, together but for those who train only now."""
    for done, turns in groupby(cohort, key=_is_done):
        if done:
            yield map(_answer, turns)
        else:
            yield from ([answer] for answer in map(_answer, turns))


def _is_done(turn: Outcome) -> bool:
    """Tell whether nobody has to train any more for an answer."""
    return not isinstance(turn, ClientRound) or turn.trained is not None


def _answer(turn: Outcome) -> Message | Exception:
    if not isinstance(turn, ClientRound):
        return turn
    task, request = turn.task, turn.request
    try:
        if turn.trained is None:
            reply = train_and_reply(task, request, turn.statement, turn.fault)
        else:
            private = task.privacy is not None
            arrays = task.bench.upload_of(turn.trained, request.arrays, private=private)
            reply = build_reply(
                task, arrays, turn.statement, turn.fault, adapted_clip_norm=turn.adapted_clip_norm
            )
        return seal_reply(task, request, reply, turn.message, turn.context)
    except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
        return _failed(error, task, turn.message)


_CHARGED_TOGETHER = 64
