"""One round for all clients of a process: requests are checked, charged and answered.

Requests are grouped into planned blocks (clients that train together), and blocks into chunks. All
clients of a chunk are charged in one write to the ledger. Then the clients of each block train, and
their answers are yielded.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context
from torch import Tensor

from fedsim.accountant.ledger.journal import Charge
from fedsim.clients.account import ChargeRefusedError, ClientBudgetExhaustedError, PrivacyAccount
from fedsim.clients.faults import ClientFailureError, Fault
from fedsim.clients.mechanisms.votes.mechanism import votes_of
from fedsim.clients.task import ClientTask
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.core.plugin_errors import contained_exits
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.errors import ENDS_RUN
from fedsim.protocol.messages import SealedReply, TrainReply, TrainRequest, Withdrawal
from fedsim.protocol.noisy_sums import AdaptiveClipNorm

if TYPE_CHECKING:
    from fedsim.clients.secure.channel import SecureChannel

logger = logging.getLogger(__name__)

BlockOf = Callable[[int, int], tuple[int, ...]]
"""Function of (round, client) that returns the planned members of the client's block, ascending."""

Reply = TrainReply | SealedReply | Withdrawal

Answer = Reply | Exception
"""A client's reply, or the exception that the client raised."""


def alone(round_number: int, client: int) -> tuple[int, ...]:
    """Return the clients that train together with a client: only itself, as `(client,)`."""
    return (client,)


@dataclass(frozen=True)
class ClientRequest:
    """A train request to one client, with the client's task and state.

    Attributes:
        task: the client's data, model and settings.
        request: the global model and the number of the round.
        context: Flower's context of the client, which holds its state.
        block: numbers of the clients that are planned to train together, ascending.
    """

    task: ClientTask
    request: TrainRequest
    context: Context
    block: tuple[int, ...]


@dataclass
class ClientRound:
    """State of one client in one round, before it trains.

    Attributes:
        asked: the train request to the client.
        fault: the client's injected fault in this round.
        model_digest: digest of the request's global model.
        start: trained parameters (size,) of the global model, flat.
        fixed_digest: digest of the arrays of the global model that are not trained.
        account: the client's privacy account, which includes the charge as soon as the charge is on
            disk; None without privacy.
        charge: the charge of the round; None without privacy or for a request charged before.
    """

    asked: ClientRequest
    fault: Fault
    model_digest: str
    start: Tensor
    fixed_digest: str
    account: PrivacyAccount | None = None
    charge: Charge | None = None

    @property
    def task(self) -> ClientTask:
        """Data, model and settings of the client."""
        return self.asked.task

    @property
    def spend(self) -> ClientSpend | None:
        """Privacy spend of the client after the charge; None without privacy."""
        return None if self.account is None else self.account.spend

    def member(self) -> BlockMember:
        """Return the client as a member of its block (clients that train together)."""
        task, spend = self.task, self.spend
        number = self.asked.request.round_number
        key, planned = StreamKey(task.run.seed, task.client, number), task.planned_steps(number)
        flat = task.training.shared_model.flat
        sent = {name: flat(array) for name, array in self.asked.request.sent.items()}
        release = task.release(self.asked.request)
        data = task.training_data(release)
        plan, steps = task.privacy, range(planned)
        if plan is None or release is None:
            return BlockMember(*data, key, steps, start=self.start, sent=sent)
        if spend is None and not release.protects_client:
            raise ValueError("a release of a client's examples needs a charge")
        charged = range(0) if spend is None else range(spend.steps - spend.round_steps, spend.steps)
        steps = release.steps_of_round(steps, charged, has_examples=task.data.size > 0)
        return BlockMember(
            *data, key, steps, release, plan.secure_noise, plan.part, self.start, sent
        )

    @property
    def shared(self) -> tuple[object, ...]:
        """Key of the client's group: equal for clients with the same model, loss and settings."""
        return id(self.task.training), self.fixed_digest


@dataclass(frozen=True)
class TrainedClient:
    """Result of a client's training.

    Attributes:
        values: flat trained parameters (size,); with distributed or central trust, the integers
            (size,) that the client adds to the noisy sum.
        adapted_clip_norm: the client's adaptive clip norm after the round; None if it is fixed.
        count: noisy bit that says whether the client's whole update was clipped. From such bits the
            server adapts the clip norm. None if the server adapts no clip norm.
    """

    values: np.ndarray
    adapted_clip_norm: AdaptiveClipNorm | None
    count: float | None


def answer_rounds(requests: Iterable[ClientRequest | Exception]) -> Iterator[Iterator[Answer]]:
    """Yield one iterator of answers for each block, in the order of the train requests.

    A block is the clients that train together. They train while the iterator is read. Read each
    iterator to its end before the next one.

    Guarantee: all charges of a block are on disk before the block trains. An answer depends on the
    planned members of the block, never on which of them got a request.

    Args:
        requests: train requests, in ascending order of clients within a round. An exception in
            place of a request is yielded as the answer.
    """
    for chunk in _chunks(_blocks(requests)):
        entries = iter(_charge([_open(asked) for block in chunk for asked in block]))
        for block in chunk:
            yield _answer_block([next(entries) for _ in block])


def _blocks(
    requests: Iterable[ClientRequest | Exception],
) -> Iterator[list[ClientRequest | Exception]]:
    """Yield lists of requests, one for each planned block; an exception is a block by itself."""
    block: list[ClientRequest | Exception] = []
    for asked in requests:
        if block and not _continues(block[-1], asked):
            yield block
            block = []
        block.append(asked)
    if block:
        yield block


def _continues(last: ClientRequest | Exception, asked: ClientRequest | Exception) -> bool:
    """Return whether a request belongs to the block before it, which has no client twice."""
    if isinstance(last, Exception) or isinstance(asked, Exception):
        return False
    same = last.request.round_number == asked.request.round_number and last.block == asked.block
    return same and last.task.client < asked.task.client


def _chunks(
    blocks: Iterable[list[ClientRequest | Exception]],
) -> Iterator[list[list[ClientRequest | Exception]]]:
    """Yield chunks of whole blocks. A chunk is charged together and has no client twice."""
    chunk: list[list[ClientRequest | Exception]] = []
    clients: set[int] = set()
    size = 0
    for block in blocks:
        members = {asked.task.client for asked in block if isinstance(asked, ClientRequest)}
        if chunk and (size + len(block) > MAX_CHARGED_CLIENTS or members & clients):
            yield chunk
            chunk, clients, size = [], set(), 0
        chunk.append(block)
        clients |= members
        size += len(block)
    if chunk:
        yield chunk


def _open(asked: ClientRequest | Exception) -> ClientRound | Answer:
    """Return a client's round with its proposed charge, or its answer where it cannot train.

    Nothing is charged yet.
    """
    if isinstance(asked, Exception):
        return asked
    task = asked.task
    try:
        with contained_exits():
            return _propose(asked)
    except ClientBudgetExhaustedError as error:
        return Withdrawal(task.client, str(error))
    except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
        return task.failure(error)


def _propose(asked: ClientRequest) -> ClientRound:
    """Return a client's round with its proposed charge; the charge is None without privacy."""
    task, request = asked.task, asked.request
    fault = task.faults.of(task.client, request.round_number)
    fault.before_charge()
    task.check_examples()
    task.check_weight(request)
    task.check_sent(request)
    if task.secure is not None:
        task.secure.check_identity(task.client)
    task.release(request)
    task.check_block(asked.block)
    model = task.training.shared_model
    digest = model.load(request.arrays)
    client_round = ClientRound(asked, fault, digest, model.start_values, model.fixed_digest)
    if task.privacy is None or not task.privacy.charges_itself:
        return client_round
    plan = task.privacy.of_round(request.round_number)
    client_round.account = account = task.accounts.of(task.client, plan)
    client_round.charge = account.propose(
        round_number=request.round_number,
        request=task.request_digest(request, asked.block, client_round.model_digest),
        steps=plan.release.releases_of(task.planned_steps(request.round_number)),
    )
    return client_round


def _charge(entries: list[ClientRound | Answer]) -> list[ClientRound | Answer]:
    """Charge all clients in one write to the ledger; if the write fails, no private client trains.

    A client that would reuse noise shows that the request is not of the run that began. Then no
    client is charged, so that the original run can still resume. The same holds for every failure
    that ends the run.
    """
    proposed = [
        (entry, (entry.account, entry.charge))
        for entry in entries
        if isinstance(entry, ClientRound) and entry.charge is not None and entry.account is not None
    ]
    if not proposed:
        return [_inject_fault(entry) for entry in entries]
    try:
        if any(_ends_run(entry) for entry in entries):
            raise ChargeRefusedError("was not charged, since another client ends the run")
        charged = proposed[0][0].task.accounts.charge([pair for _, pair in proposed])
    except Exception as error:  # noqa: BLE001  no charge, no training
        failed = {id(entry): entry.task.failure(error) for entry, _ in proposed}
        return [failed.get(id(entry), entry) for entry in entries]
    for (entry, _), account in zip(proposed, charged, strict=True):
        entry.account = account
    return [_inject_fault(entry) for entry in entries]


def _ends_run(entry: ClientRound | Answer) -> bool:
    return isinstance(entry, ClientFailureError) and entry.code in ENDS_RUN


def _inject_fault(entry: ClientRound | Answer) -> ClientRound | Answer:
    """Return a charged round, or the failure of a client with an injected fault in training."""
    if isinstance(entry, ClientRound):
        try:
            entry.fault.after_charge()
        except Exception as error:  # noqa: BLE001  the client's failure
            return entry.task.failure(error)
    return entry


def _answer_block(entries: Sequence[ClientRound | Answer]) -> Iterator[Answer]:
    """Yield the answers of one block, in order.

    Members that share model and settings train together. Where that fails, each member trains in
    its planned block with all others absent, which gives the same bits, and raises its own error.
    """
    groups: dict[object, list[ClientRound]] = {}
    for entry in entries:
        if isinstance(entry, ClientRound):
            groups.setdefault(entry.shared, []).append(entry)
    trained: dict[int, TrainedClient] = {}
    for group in groups.values():
        if len(group) == 1:
            continue  # a single client trains in `_answer`
        try:
            with contained_exits():
                trained.update(_train(group))
        except Exception as error:  # noqa: BLE001  alone, each client shows its own error
            logger.info("a block failed, so its clients train alone: %s", type(error).__name__)
    for entry in entries:
        if isinstance(entry, ClientRound):
            yield _answer(entry, trained.get(entry.task.client))
        else:
            yield entry


def _train(rounds: Sequence[ClientRound]) -> dict[int, TrainedClient]:
    """Train members of one block that share model, loss and settings, with all others absent."""
    how, block = rounds[0].task.training, rounds[0].asked.block
    if how.voter is not None:
        return {
            entry.task.client: TrainedClient(votes_of(entry.task, entry.asked.request), None, None)
            for entry in rounds
        }
    how.shared_model.load(rounds[0].asked.request.arrays)
    members = {entry.task.client: entry.member() for entry in rounds}
    planned = block if how.blocks.places is None else tuple(members)
    result = block_of(
        how.shared_model,
        how.loss,
        how.gradients,
        how.local,
        [members.get(client) for client in planned],
        rows=how.blocks.rows(block),
        places=how.blocks.places,
        rule=how.rule,
    ).train()
    places = [place for place, client in enumerate(planned) if client in members]
    present = result.values if len(places) == len(planned) else result.values[places]
    rows = present.cpu().numpy()
    return {
        client: TrainedClient(row, result.adapted_clip_norm[place], result.counts[place])
        for client, row, place in zip(members, rows, places, strict=True)
    }


def _answer(entry: ClientRound, trained: TrainedClient | None) -> Answer:
    try:
        with contained_exits():
            return _upload(entry, trained or _train([entry])[entry.task.client])
    except Exception as error:  # noqa: BLE001  whatever a client raises is its failure
        return entry.task.failure(error)


def _upload(entry: ClientRound, trained: TrainedClient) -> TrainReply | SealedReply:
    """Return the reply of a trained client, sealed under secure aggregation."""
    task, request, count = entry.task, entry.asked.request, trained.count
    model = task.training.shared_model
    if task.privacy is not None and task.privacy.part is not None:
        arrays = model.integers_of(trained.values, count=count)
        count = None  # the count is one of the integers of the sum
    else:
        private = task.privacy is not None
        arrays = model.upload_of(trained.values, request.arrays, private=private)
    reply = TrainReply(
        entry.fault.alter_upload(arrays),
        task.examples,
        entry.spend,
        delay=entry.fault.delay,
        clip_norm=trained.adapted_clip_norm,
        clip_count=count,
        numbers=_numbers(entry) if task.secure is None else {},
    )
    return reply if task.secure is None else _seal(entry, reply, task.secure)


def _numbers(entry: ClientRound) -> Mapping[str, float]:
    """Return the declared metrics of the request's model on the client's examples."""
    measure, shared_model = entry.task.scores.measure, entry.task.training.shared_model
    if measure is None:
        return {}
    shared_model.load(entry.asked.request.arrays)
    shared_model.restart()  # the model of the request, not the trained one
    return measure(shared_model.model)


def _seal(entry: ClientRound, reply: TrainReply, channel: "SecureChannel") -> SealedReply:
    """Return a client's reply in sealed form.

    Raises:
        ClientFailureError: the update cannot be sealed.
    """
    task, request = entry.task, entry.asked.request
    return channel.seal(
        task.client,
        request,
        reply,
        model_digest=entry.model_digest,
        metrics=_numbers(entry),
        context=entry.asked.context,
    )


MAX_CHARGED_CLIENTS = 64  # in one append to the ledger, or the clients of one larger block
