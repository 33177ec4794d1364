"""The clients' work: to train one model, or with `task: pate` to vote on labels for a student."""

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
from fedsim.pate.public_answers import NOT_CHECKED, Agenda, PublicAnswers, labels_of, shares_of
from fedsim.pate.queries import with_queries
from fedsim.pate.server import Tally
from fedsim.pate.settings import PateSettings
from fedsim.pate.teachers import Student, Teachers, Trainer, public_tensor
from fedsim.protocol.arrays import digest, to_numpy
from fedsim.server.app import scored_models


class Goal:
    """The work of a federation's clients: in this base class, to train one model together.

    Attributes:
        averages: whether the server averages the clients' uploads into a model.
    """

    averages = True

    @classmethod
    def split(
        cls, experiment: Experiment, data: FederatedData
    ) -> tuple[FederatedData, Examples | None]:
        """Return the data to train and test on, and the public examples to vote on ("queries").

        In this base class, the first are all data, and the second is None.

        Args:
            experiment: the settings.
            data: the data of the experiment.

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
        """Return the goal of an experiment, and the model that all clients of a process train.

        Args:
            experiment: the settings.
            queries: the public queries that `split` returned.
            parts: the method for gradients and the shared model, made from the initial model.
            loss: the loss function, which returns one value per example.
            classes: the number of classes; 0 if the targets are not classes.
            device: the device on which models run.
        """
        return cls(), parts.shared_model

    @property
    def public_queries(self) -> Examples | None:
        """The public queries that clients vote on; None if clients train a model."""
        return None

    def algorithm(self) -> Algorithm | None:
        """Return the federated algorithm of this goal; None if the experiment chooses it."""
        return None

    @property
    def voter(self) -> Teachers | None:
        """The teacher models of this process's clients; None if clients train one model."""
        return None

    def digest(self, conditions: str) -> str:
        """Return the digest of all settings and data that must stay the same in a run.

        This base class returns `conditions`, the digest of what all goals have in common.
        """
        return conditions

    def model_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model for the server's arrays; in this base class the arrays are the model."""
        return arrays

    def scored(self, algorithm: Algorithm, state: ServerState) -> Models:
        """Return the models to evaluate after a round: usually the global model.

        If the algorithm keeps a personal model for each client, these are all personal models.
        """
        return scored_models(algorithm, state)

    def counts(self, models: Models) -> dict[str, float]:
        """Return numbers by name that a round reports in addition to a model's metrics.

        In this base class, there are none.
        """
        return {}


@dataclass(frozen=True)
class Voting(Goal):
    """The clients' work with `task: pate`: their teacher models vote on labels of public examples.

    A student model learns these labels. Rounds update no model, but a record of the answers
    (`PublicAnswers`).

    Attributes:
        settings: the `pate:` section of the experiment.
        agenda: the plan of which queries (public examples) clients vote on in each round.
        queries: the queries, with their true labels, which are used in reports only.
        classes: the number of classes.
        teachers: the teacher models of this process's clients.
        is_private: whether votes have noise.
        students: the last student model, by the digest of the answers it was trained on.
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
        """Return the data without some test examples, and these examples as public queries."""
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
        """Return the `Voting` of an experiment, and an empty record of answers as the model."""
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
        return voting, SharedModel(voting.public_answers().to(device))

    @property
    def public_queries(self) -> Examples:
        """The public queries that clients vote on."""
        return self.queries

    def public_answers(self) -> PublicAnswers:
        """Return the record of answers before the first round, which holds no answers."""
        return PublicAnswers(self.agenda.rows, len(self.queries), self.classes)

    def algorithm(self) -> Algorithm:
        """Return the federated algorithm by which the server counts the votes."""
        return Tally(self.agenda, is_noisy=self.is_private)

    def digest(self, conditions: str) -> str:
        """Return the digest of all settings and data that must stay the same in a run.

        Args:
            conditions: the digest of what all goals have in common; facts on voting are added to
                it.
        """
        start = digest(self.teachers.trainer.start)
        content = [conditions, self.settings.model_dump_json(), repr(self.agenda), start]
        state = hashlib.sha256("\n".join(content).encode())
        state.update(digest_examples(self.queries))
        return state.hexdigest()

    @property
    def voter(self) -> Teachers:
        """The teacher models of this process's clients, which vote."""
        return self.teachers

    def model_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the student model that is trained on the answers in the server's arrays.

        The last student is kept, and returned again for the same answers.
        """
        return self.student(arrays)

    def scored(self, algorithm: Algorithm, state: ServerState) -> Models:
        """Return the model to evaluate after a round: the student model."""
        return self.student(state.model)

    def student(self, answers: ArrayRecord) -> ArrayRecord:
        """Return the student model that is trained on a record of answers.

        The last student is kept, and returned again for the same answers.
        """
        known = digest(answers)
        if known not in self.students:
            self.students.clear()
            teachers = self.teachers
            student = Student(
                teachers.trainer, self.settings.student.local, teachers.seed, teachers.queries
            )
            self.students[known] = student.arrays(labels_of(to_numpy(answers)))
        return self.students[known]

    def counts(self, models: Models) -> dict[str, float]:
        """Return how many queries were checked and answered, and the accuracy of the answers.

        The accuracy is the share of answers that are the true label; it is NaN without answers.
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
"""The goal class of each task, by the name of the task."""


def _pate_of(experiment: Experiment) -> PateSettings:
    """Return the `pate:` section of an experiment.

    Raises:
        ValueError: the experiment has another task.
    """
    if experiment.pate is None:
        raise ValueError("only task: pate has ballots")
    return experiment.pate
