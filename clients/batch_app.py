"""Many clients of one process: charged in one append, trained in cohorts.

A group of requests is charged first, all in one append to the ledger. Then the clients train, in
cohorts or one by one, and their replies are yielded cohort by cohort. Cohorts change no bit of any
reply (`training/cohorts.py`).
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
    failure_reply,
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
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.messages import TrainRequest, Withdrawal

logger = logging.getLogger(__name__)

Request = tuple[Message, Context]

AnswerGroup = Iterable[Message | Exception]
"""Answers of one cohort; in place of an answer, the exception that the client raised."""


@runtime_checkable
class BatchAnswers(Protocol):
    """An app that can answer a group of train requests at once."""

    @property
    def group_size(self) -> int:
        """Most requests in one group."""
        ...

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield groups of answers, in the order of the requests.

        Answers are computed while their group is read. Read a group before asking for the next
        one, which may take long.

        Guarantee: each answer is the one that the client gives alone.
        """
        ...


@dataclass
class ClientRound:
    """One client in one round: task, request, charge and result.

    Attributes:
        account: the client's account, with the charge once committed; None without privacy.
        charge: the cost of the round; None without privacy or for an earlier charge.
        trained_values: flat trained parameters (size,); None until the client's cohort has trained.
        adapted_clip_norm: clipping bound after the round; None where it is fixed.
    """

    task: ClientTask
    request: TrainRequest
    message: Message
    context: Context
    fault: Fault
    account: PrivacyAccount | None = None
    charge: Charge | None = None
    trained_values: np.ndarray | None = None
    adapted_clip_norm: float | None = None

    @cached_property
    def member(self) -> CohortMember:
        """The client as a member of a cohort."""
        task = self.task
        key = StreamKey(task.seed, task.client, self.request.round_number)
        steps = steps_to_take(task, self.spend, self.fault)
        if task.privacy is None:
            return CohortMember(*task.data(), key, steps)
        secure = task.privacy.secure_noise
        return CohortMember(*task.data(), key, steps, task.step(self.request), secure)

    @property
    def kind(self) -> Hashable:
        """Key of a cohort: equal for clients that can train together."""
        task, member = self.task, self.member
        clipping = None if member.step is None else member.step.clipping.kind
        shape = (member.features.shape[1:], member.features.dtype)
        same = (id(task.shared_model), id(task.loss), task.local, len(member.steps))
        return (*same, clipping, shape)

    @property
    def spend(self) -> ClientSpend | None:
        """The client's spend after the charge; None without privacy."""
        return None if self.account is None else self.account.spend


PendingAnswer = ClientRound | Message | Exception


class BatchClientApp(ClientApp):
    """The clients of one process as a ClientApp that can also answer many requests at once.

    Args:
        task_of: returns the task of a client by its number.
        cohort_size: most clients that train together; 1: each alone.
    """

    def __init__(self, task_of: Callable[[int], ClientTask], *, cohort_size: int) -> None:
        super().__init__()
        self._task_of = task_of
        self._single_client_app = make_client_app(task_of)
        self._cohort_size = cohort_size

    @property
    def group_size(self) -> int:
        """Most requests in one group."""
        return max(_CHARGE_GROUP_CLIENTS, self._cohort_size)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one request."""
        return self._single_client_app(message, context)

    def answer_batch(self, requests: Sequence[Request]) -> Iterator[AnswerGroup]:
        """Yield the answers of one cohort after the other, in the order of the requests.

        Guarantee: every charge of the group is durable before the first of its clients trains; each
        answer is the one that the client gives alone.
        """
        with one_thread():
            pending = deque(_charge_all([self._open_round(*request) for request in requests]))
            cohorts = -(-len(pending) // self._cohort_size)
            while pending:  # results are released cohort by cohort
                even = -(-len(pending) // cohorts)
                cohort, cohorts = [pending.popleft() for _ in range(even)], cohorts - 1
                _train_together([each for each in cohort if isinstance(each, ClientRound)])
                yield from _answer_cohort(cohort)

    def _open_round(self, message: Message, context: Context) -> "PendingAnswer":
        """Return a client's round, or the answer of a client that does not train."""
        try:
            task = self._task_of(partition_of(context))
        except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
            return error
        try:
            request = TrainRequest.from_message(message)
            fault = task.faults.of(task.client, request.round_number)
            fault.before_charge()
            task.check_examples()
            client_round = ClientRound(task, request, message, context, fault)
            _propose_charge(client_round)
        except ClientBudgetExhaustedError as error:
            return Withdrawal(task.client, str(error)).to_message(message)
        except Exception as error:  # noqa: BLE001  likewise
            return _failure(error, task, message)
        return client_round


def _failure(error: Exception, task: ClientTask, message: Message) -> Message | Exception:
    try:
        return failure_reply(error, message, private=task.privacy is not None)
    except Exception as unexpected:  # noqa: BLE001  the engine reports it
        return unexpected


def _propose_charge(client_round: ClientRound) -> None:
    """Set the account and the cost of the round; nothing is charged yet."""
    task, request = client_round.task, client_round.request
    if task.privacy is None:
        return
    client_round.account = PrivacyAccount.restore(
        client_round.context.state, task.privacy, client=task.client, journal=task.journal
    )
    client_round.charge = client_round.account.propose(
        round_number=request.round_number,
        request=request_digest(task, request),
        steps=task.local.steps,
    )


def _charge_all(pending: list[PendingAnswer]) -> list[PendingAnswer]:
    """Charge all rounds in one write; if it fails, no charged client trains."""
    proposed = [e for e in pending if isinstance(e, ClientRound) and e.charge is not None]
    if not proposed:
        return pending
    journal = proposed[0].task.journal
    try:
        if journal is not None:
            journal.append_all([each.charge for each in proposed if each.charge is not None])
    except Exception as error:  # noqa: BLE001  no charge, no training
        return [error if any(e is one for one in proposed) else e for e in pending]
    for client_round in proposed:
        charge, state = client_round.charge, client_round.context.state
        if client_round.account is not None and charge is not None:
            client_round.account = client_round.account.commit(charge, state)
    return pending


def _train_together(client_rounds: list[ClientRound]) -> None:
    """Train clients of one kind together; a client alone in its kind stays untrained."""
    kinds: dict[Hashable, list[ClientRound]] = {}
    if len(client_rounds) > 1:
        for client_round in client_rounds:
            kinds.setdefault(client_round.kind, []).append(client_round)
    for cohort in kinds.values():
        if len(cohort) < 2:
            continue
        task, request = cohort[0].task, cohort[0].request
        try:
            task.shared_model.load(request.arrays)
            members = [client_round.member for client_round in cohort]
            together = train_together(task.shared_model, task.loss, task.local, members)
        except Exception as error:  # noqa: BLE001  alone, each client shows its own error
            logger.info("a cohort failed, so its clients train alone: %s", type(error).__name__)
            continue
        rows = together.values.cpu().numpy()
        for client_round, row, norm in zip(cohort, rows, together.adapted_clip_norm, strict=True):
            client_round.trained_values, client_round.adapted_clip_norm = row, norm


def _answer_cohort(cohort: list[PendingAnswer]) -> Iterator[AnswerGroup]:
    """Yield the answers of a cohort in groups; a client still to be trained is its own group."""
    for is_trained, pending in groupby(cohort, key=_is_trained):
        if is_trained:
            yield map(_answer, pending)
        else:
            yield from ([answer] for answer in map(_answer, pending))


def _is_trained(pending: PendingAnswer) -> bool:
    """Whether the answer needs no further training."""
    return not isinstance(pending, ClientRound) or pending.trained_values is not None


def _answer(pending: PendingAnswer) -> Message | Exception:
    if not isinstance(pending, ClientRound):
        return pending
    client_round, task, request = pending, pending.task, pending.request
    try:
        if client_round.trained_values is None:
            reply = train_and_reply(task, request, client_round.spend, client_round.fault)
        else:
            private = task.privacy is not None
            arrays = task.shared_model.upload_of(
                client_round.trained_values, request.arrays, private=private
            )
            reply = build_reply(
                task,
                arrays,
                client_round.spend,
                client_round.fault,
                adapted_clip_norm=client_round.adapted_clip_norm,
            )
        return seal_reply(task, request, reply, client_round.message, client_round.context)
    except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
        return _failure(error, task, client_round.message)


_CHARGE_GROUP_CLIENTS = 64
