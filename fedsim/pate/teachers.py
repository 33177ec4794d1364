"""Teachers and student of PATE; a teacher is trained once, without noise, and stays private."""

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
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose, stream_key
from fedsim.models.tasks import eval_mode
from fedsim.pate.public_answers import SHARES, Agenda
from fedsim.protocol.arrays import to_arrays

_BATCH = 1024  # queries in one forward pass


@dataclass(frozen=True)
class Trainer:
    """A trainer that trains a model from its initial weights without noise.

    Attributes:
        model: the model that all clients of this process share; each training starts from `start`.
        loss: the loss, which returns one value per example.
        gradients: per-example gradient rules of the model; None computes gradients by torch.
        start: the initial weights.
    """

    model: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    start: ArrayRecord

    def train(self, x: Tensor, y: Tensor, local: LocalSettings, key: StreamKey) -> None:
        """Train the model in place on the given examples, starting from the initial weights.

        Args:
            x: features (n, ...), n ≥ 1.
            y: targets (n,).
            local: settings of the training: steps, batch size and optimizer.
            key: key of the random streams.
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
            classes_of_parts = [
                network(part)[:, :classes].argmax(dim=1) for part in x.split(_BATCH)
            ]
        return torch.cat(classes_of_parts).cpu().numpy()


@dataclass(frozen=True)
class Teachers:
    """The teachers of the clients in this process, which vote on queries.

    Guarantee: a client's labels are a function of its own examples, the seed and public values.

    Attributes:
        trainer: trainer of the teachers.
        local: the section `local` of the experiment.
        seed: the experiment's seed.
        queries: features of the public queries (queries, ...).
        classes: number of classes.
        agenda: the rule that chooses the queries of each round.
        known: labels (queries,) that each teacher trained so far predicts, by client. PRIVATE.
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
        answers: Mapping[str, np.ndarray],
    ) -> NDArray[np.int64]:
        """Return a client's vote on each query of a round, a label for each row, (rows,).

        The first call trains the client's teacher. A row without a vote has `NO_LABEL`.

        Args:
            client: number of the client.
            data: the client's features (n, ...) and targets (n,).
            round_number: number of the round.
            answers: the public results so far, by name.
        """
        asked = self.agenda.asked(round_number, answers[SHARES])
        labels = self._teacher_labels(client, data)[asked]
        return np.where(asked >= 0, labels, NO_LABEL)

    def _teacher_labels(self, client: int, data: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
        """Return a teacher's label of every query (queries,); the first call trains the teacher.

        A client without examples has no teacher and does not vote.
        """
        if client not in self.known:
            if len(data[0]) == 0:
                self.known[client] = np.full(len(self.queries), NO_LABEL, dtype=np.int64)
            else:
                self.trainer.train(*data, self.local, StreamKey(self.seed, client, 0))
                self.known[client] = self.trainer.predict(self.queries, self.classes)
        return self.known[client]

    def student(self, local: LocalSettings, labels: NDArray[np.int64]) -> ArrayRecord:
        """Return the weights of the public model of PATE, trained on the answered queries.

        Without answers, these are the initial weights.

        Args:
            local: settings of the training: steps, batch size and optimizer.
            labels: label of each query (queries,); `NO_LABEL` for a query without an answer.
        """
        rows = torch.from_numpy(np.flatnonzero(labels != NO_LABEL)).to(self.queries.device)
        if len(rows) == 0:
            return self.trainer.start
        targets = torch.from_numpy(labels).to(self.queries.device)[rows]
        x = self.queries.index_select(0, rows)
        key = stream_key(self.seed, Purpose.STUDENT)  # other streams than those of all clients
        student = StreamKey(int.from_bytes(key[:8], "little"), 0, 0)
        self.trainer.train(x, targets, local, student)
        return values_of(self.trainer.model)


def values_of(model: SharedModel) -> ArrayRecord:
    """Return a copy of the current values of a model."""
    state = model.model.state_dict().items()
    return to_arrays({name: value.cpu().numpy().copy() for name, value in state})
