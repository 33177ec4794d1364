"""The clients' teachers: each is trained once, without noise, and never leaves its client."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.training.streams import StreamKey
from fedsim.core.streams import Purpose, stream_key
from fedsim.data import Examples
from fedsim.models.tasks import eval_mode
from fedsim.pate.board import Agenda, shares_of
from fedsim.protocol.arrays import to_arrays

_BATCH = 1024  # queries in one forward pass


@dataclass(frozen=True)
class Trainer:
    """Plain training of one model from the initial weights.

    Attributes:
        model: of the process; every training starts from the weights in `start`.
        loss: one value per example.
        gradients: rules of the model; None: gradients by torch.
        start: the initial weights.
    """

    model: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    start: ArrayRecord

    @classmethod
    def of(
        cls, model: SharedModel, loss: PerExampleLoss, gradients: PerExampleGradients | None
    ) -> "Trainer":
        """Return the trainer of a model that has its initial weights.

        Args:
            model: the model.
            loss: one value per example.
            gradients: rules of the model; None: gradients by torch.
        """
        return cls(model, loss, gradients, _values_of(model))

    def train(self, x: Tensor, y: Tensor, local: LocalSettings, key: StreamKey) -> None:
        """Train the model of the process on some examples.

        Args:
            x: features (n, ...), n ≥ 1.
            y: targets (n,).
            local: steps, batch size and optimizer.
            key: of the random streams.
        """
        self.model.load(self.start)
        member = BlockMember(x, y, key, range(local.given_steps))
        block_of(self.model, self.loss, self.gradients, local, [member]).train()

    def predict(self, x: Tensor, classes: int) -> NDArray[np.int64]:
        """Return the class with the largest output for each example (n,).

        Args:
            x: features (n, ...).
            classes: number of classes; further outputs are ignored.
        """
        network = self.model.model
        with eval_mode(network), torch.no_grad():
            found = [network(part)[:, :classes].argmax(dim=1) for part in x.split(_BATCH)]
        return torch.cat(found).cpu().numpy()


@dataclass(frozen=True)
class Teachers:
    """The votes of all clients of a process.

    Guarantee: a client's labels are a function of its own examples, the seed and public facts.

    Attributes:
        trainer: trains a teacher.
        local: `local:` of the experiment.
        seed: of the experiment.
        queries: features of the public queries (queries, ...).
        classes: number of classes.
        agenda: which queries a ballot asks.
        known: predicted labels of the teachers that were trained, by client. PRIVATE.
    """

    trainer: Trainer
    local: LocalSettings
    seed: int
    queries: Tensor
    classes: int
    agenda: Agenda
    known: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def labels(
        self,
        client: int,
        data: tuple[Tensor, Tensor],
        round_number: int,
        board: Mapping[str, np.ndarray],
    ) -> NDArray[np.int64]:
        """Return the client's label for each row of a ballot (rows,); `NO_LABEL`: no vote.

        Args:
            client: its number.
            data: its features and targets (n, ...).
            round_number: the round of the ballot.
            board: the public results so far, by name.
        """
        asked = self.agenda.asked(round_number, shares_of(board))
        labels = self._teacher_labels(client, data)[asked]
        return np.where(asked >= 0, labels, NO_LABEL)

    def _teacher_labels(self, client: int, data: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
        """Return the label of every query (queries,), from the teacher trained at the first call.

        A client without examples has no teacher and votes for nothing.
        """
        if client not in self.known:
            if len(data[0]) == 0:
                self.known[client] = np.full(len(self.queries), NO_LABEL, dtype=np.int64)
            else:
                self.trainer.train(*data, self.local, StreamKey(self.seed, client, 0))
                self.known[client] = self.trainer.predict(self.queries, self.classes)
        return self.known[client]


@dataclass(frozen=True)
class Student:
    """The public model, trained on the queries that have an answer.

    Attributes:
        trainer: trains it.
        local: steps, batch size and optimizer.
        seed: of its random streams.
        queries: features of the public queries (queries, ...).
    """

    trainer: Trainer
    local: LocalSettings
    seed: int
    queries: Tensor

    @property
    def _key(self) -> StreamKey:
        """Key of the student's streams, apart from those of every client."""
        key = stream_key(self.seed, Purpose.STUDENT)
        return StreamKey(int.from_bytes(key[:8], "little"), 0, 0)

    def arrays(self, labels: NDArray[np.int64]) -> ArrayRecord:
        """Return the trained student; the initial model where no query has an answer.

        Args:
            labels: of each query (queries,); `NO_LABEL`: without an answer.
        """
        rows = torch.from_numpy(np.flatnonzero(labels != NO_LABEL)).to(self.queries.device)
        if len(rows) == 0:
            return self.trainer.start
        targets = torch.from_numpy(labels).to(self.queries.device)[rows]
        x = self.queries.index_select(0, rows)
        self.trainer.train(x, targets, self.local, self._key)
        return _values_of(self.trainer.model)


def _values_of(model: SharedModel) -> ArrayRecord:
    """Return a copy of the values that a model has now."""
    state = model.model.state_dict().items()
    return to_arrays({name: value.cpu().numpy().copy() for name, value in state})


def public_tensor(queries: Examples, device: torch.device) -> Tensor:
    """Return the features of the queries on a device, without their labels.

    Args:
        queries: the public queries.
        device: of the models.
    """
    return torch.from_numpy(queries.features).to(device)
