"""The clients' work: to train one model, or with `task: pate` to vote on labels for a student."""

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL
from fedsim.clients.training.shared_model import SharedModel
from fedsim.data import Examples
from fedsim.data.examples import digest_examples
from fedsim.experiment import Experiment
from fedsim.federation.plan import Goal
from fedsim.federation.trained_model import FederationModel
from fedsim.pate.public_answers import LABELS, NOT_CHECKED, SHARES, Agenda, PublicAnswers, Tally
from fedsim.pate.settings import PateSettings
from fedsim.pate.teachers import Teachers, Trainer, values_of
from fedsim.protocol.arrays import digest, to_numpy


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
        teachers: the teacher models of this process's clients, which vote.
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

    @property
    def public_queries(self) -> Examples:
        """The public examples on which clients vote."""
        return self.queries

    @property
    def voter(self) -> Teachers:
        """The teacher models of this process's clients, which vote."""
        return self.teachers

    def algorithm(self) -> Algorithm:
        """Return the federated algorithm by which the server counts the votes."""
        return Tally(self.agenda, is_noisy=self.is_private)

    def digest(self, conditions: str) -> str:
        """Return the digest of all settings and data that must stay the same in a run.

        Args:
            conditions: the digest of what all tasks have in common; facts on voting are added.
        """
        start = digest(self.teachers.trainer.start)
        content = [conditions, self.settings.model_dump_json(), repr(self.agenda), start]
        state = hashlib.sha256("\n".join(content).encode())
        state.update(digest_examples(self.queries))
        return state.hexdigest()

    def model_of(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the student model that is trained on a record of answers.

        The last student is kept, and returned again for the same answers.
        """
        known = digest(arrays)
        if known not in self.students:
            self.students.clear()
            labels = to_numpy(arrays)[LABELS]
            self.students[known] = self.teachers.student(self.settings.student.local, labels)
        return self.students[known]

    def counts(self, arrays: ArrayRecord) -> dict[str, float]:
        """Return how many queries were checked and answered, and the accuracy of the answers.

        The accuracy is the share of answers that are the true label; it is NaN without answers.
        """
        values = to_numpy(arrays)
        labels, checked = values[LABELS], values[SHARES] > NOT_CHECKED / 2
        answered = labels != NO_LABEL
        right = labels[answered] == self.queries.targets[answered]
        return {
            "queries_checked": int(checked.sum()),
            "queries_answered": int(answered.sum()),
            "label_accuracy": float(np.mean(right)) if len(right) else float("nan"),
        }


def voting_of(
    experiment: Experiment, queries: Examples, model: FederationModel, *, classes: int
) -> tuple[Voting, FederationModel]:
    """Return the votes of an experiment with `task: pate`, and the record of answers as its model.

    Args:
        experiment: the settings.
        queries: the public queries.
        model: the initial model, which teachers and student train.
        classes: the number of classes.
    """
    settings = experiment.pate
    if settings is None:
        raise ValueError("without a section `pate:` there is nothing to vote on")
    agenda = Agenda(settings.ballots(experiment.federation.rounds), settings.threshold)
    teachers = Teachers(
        Trainer(model.shared, model.loss, model.gradients, values_of(model.shared)),
        experiment.local,
        experiment.seed,
        torch.from_numpy(queries.features).to(model.device),
        classes,
        agenda,
    )
    voting = Voting(settings, agenda, queries, classes, teachers, experiment.privacy is not None)
    answers = PublicAnswers(agenda.rows, len(queries), classes)
    return voting, replace(model, shared=SharedModel(answers.to(model.device)))
