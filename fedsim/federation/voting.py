"""What the clients of a federation work on: a model, or with PATE votes and a student of them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedsim.algorithms.algorithm import Algorithm
from fedsim.algorithms.state import ServerState
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL
from fedsim.clients.training.shared_model import SharedModel
from fedsim.data import Examples, FederatedData
from fedsim.experiment import Experiment
from fedsim.federation.conditions import digest_examples
from fedsim.federation.public_scores import Models
from fedsim.federation.trained_model import TrainedParts
from fedsim.pate.board import NOT_CHECKED, Agenda, Board, labels_of, shares_of
from fedsim.pate.queries import with_queries
from fedsim.pate.server import Tally
from fedsim.pate.settings import PateSettings
from fedsim.pate.teachers import Student, Teachers, Trainer, public_tensor
from fedsim.protocol.arrays import digest, to_numpy
from fedsim.server.app import scored_models


class Goal:
    """What the clients of a federation work on: here, a model that they train together.

    Attributes:
        averages: whether what the server makes of uploads is a mean of models.
    """

    averages = True

    @classmethod
    def split(
        cls, experiment: Experiment, data: FederatedData
    ) -> tuple[FederatedData, Examples | None]:
        """Return the data without the public queries, and these; None: the task has none.

        Args:
            experiment: the settings.
            data: of the experiment.

        Raises:
            DataError: too few test examples are left, or the targets are not classes.
        """
        return data, None

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        queries: Examples | None,
        parts: TrainedParts,
        loss: PerExampleLoss,
        *,
        classes: int,
        device: torch.device,
    ) -> "tuple[Goal, SharedModel]":
        """Return the goal of an experiment, and the model that its clients share.

        Args:
            experiment: the settings.
            queries: as `split` returned them.
            parts: of the initial model.
            loss: one value per example.
            classes: number of classes; 0 where targets are none.
            device: where models run.
        """
        return cls(), parts.shared_model

    @property
    def public_queries(self) -> Examples | None:
        """The public queries that clients vote on; None: there are none."""
        return None

    def algorithm(self) -> Algorithm | None:
        """Return what the server makes of uploads; None: the experiment's algorithm."""
        return None

    @property
    def voter(self) -> Teachers | None:
        """The votes of the clients of this process; None: they train."""
        return None

    def digest(self, conditions: str) -> str:
        """Return the digest of what a run depends on, from that of what every run depends on."""
        return conditions

    def model_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that the arrays of the server stand for."""
        return arrays

    def scored(self, algorithm: Algorithm, state: ServerState) -> Models:
        """Return what is scored after a round: the global model, or the clients' own models."""
        return scored_models(algorithm, state)

    def counts(self, models: Models) -> dict[str, float]:
        """Return figures beside the metrics of a model."""
        return {}


@dataclass(frozen=True)
class Voting(Goal):
    """Queries, teachers, ballots and student of a run, where clients vote on a board.

    Attributes:
        settings: `pate:` of the experiment.
        agenda: which queries a ballot asks.
        queries: the public queries, with the labels that only reports see.
        classes: number of classes.
        teachers: the votes of the clients of this process.
        is_private: whether votes have noise.
        students: the last student, by the digest of the board.
    """

    averages = False

    settings: PateSettings
    agenda: Agenda
    queries: Examples
    classes: int
    teachers: Teachers
    is_private: bool
    students: dict[str, ArrayRecord] = field(default_factory=dict)

    @classmethod
    def split(cls, experiment: Experiment, data: FederatedData) -> tuple[FederatedData, Examples]:
        """Return the data with the rest of the test set, and the queries."""
        return with_queries(data, _pate_of(experiment).queries, seed=experiment.seed)

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        queries: Examples | None,
        parts: TrainedParts,
        loss: PerExampleLoss,
        *,
        classes: int,
        device: torch.device,
    ) -> "tuple[Voting, SharedModel]":
        """Return the voting of an experiment, and the empty board."""
        settings, rounds = _pate_of(experiment), experiment.federation.rounds
        if queries is None:
            raise ValueError("a vote needs public queries, got none")
        agenda = Agenda(settings.ballots(rounds), settings.threshold)
        teachers = Teachers(
            Trainer.of(parts.shared_model, loss, parts.gradients),
            experiment.local,
            experiment.seed,
            public_tensor(queries, device),
            classes,
            agenda,
        )
        private = experiment.privacy is not None
        voting = cls(settings, agenda, queries, classes, teachers, private)
        return voting, SharedModel(voting.board().to(device))

    @property
    def public_queries(self) -> Examples:
        """The public queries that clients vote on."""
        return self.queries

    def board(self) -> Board:
        """Return the empty board."""
        return Board(self.agenda.rows, len(self.queries), self.classes)

    def algorithm(self) -> Algorithm:
        """Return what the server makes of the votes."""
        return Tally(self.agenda, is_noisy=self.is_private)

    def digest(self, conditions: str) -> str:
        """Return the digest of the conditions of a run with ballots.

        Args:
            conditions: digest of what every run depends on.
        """
        start = digest(self.teachers.trainer.start)
        content = [conditions, self.settings.model_dump_json(), repr(self.agenda), start]
        state = hashlib.sha256("\n".join(content).encode())
        state.update(digest_examples(self.queries))
        return state.hexdigest()

    @property
    def voter(self) -> Teachers:
        """The votes of the clients of this process."""
        return self.teachers

    def model_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the student of a board."""
        return self.student(arrays)

    def scored(self, algorithm: Algorithm, state: ServerState) -> Models:
        """Return the student."""
        return self.student(state.model)

    def student(self, board: ArrayRecord) -> ArrayRecord:
        """Return the student that is trained on the answers of a board."""
        known = digest(board)
        if known not in self.students:
            self.students.clear()
            teachers = self.teachers
            student = Student(
                teachers.trainer, self.settings.student.local, teachers.seed, teachers.queries
            )
            self.students[known] = student.arrays(labels_of(to_numpy(board)))
        return self.students[known]

    def counts(self, models: Models) -> dict[str, float]:
        """Return figures of the answers of a board so far, with the public labels of the queries.

        `label_accuracy` is the share of correct answers; NaN without any.
        """
        if not isinstance(models, ArrayRecord):
            return {}
        arrays = to_numpy(models)
        labels, checked = labels_of(arrays), shares_of(arrays) > NOT_CHECKED / 2
        answered = labels != NO_LABEL
        right = labels[answered] == self.queries.targets[answered]
        return {
            "queries_checked": int(checked.sum()),
            "queries_answered": int(answered.sum()),
            "label_accuracy": float(np.mean(right)) if len(right) else float("nan"),
        }


GOALS: Mapping[str, type[Goal]] = {"federated": Goal, "pate": Voting}
"""What clients work on, by the name of the task."""


def _pate_of(experiment: Experiment) -> PateSettings:
    """Return `pate:` of an experiment.

    Raises:
        ValueError: the experiment has another task.
    """
    if experiment.pate is None:
        raise ValueError("only task: pate has ballots")
    return experiment.pate
