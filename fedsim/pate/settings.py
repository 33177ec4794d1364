"""Settings of PATE, the section `pate` of an experiment with `task: pate`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fedsim.clients.local_settings import LocalSettings, OptimizerSettings, SgdSettings
from fedsim.clients.mechanisms.votes.ballots import Ballot, Ballots
from fedsim.core.formatting import count_text
from fedsim.core.limits import MAX_EXAMPLES, MAX_STEPS
from fedsim.core.settings import Settings


class StudentSettings(Settings):
    """Settings of the student's training on the answered queries."""

    steps: int = Field(default=300, ge=1, le=MAX_STEPS, description="optimizer steps")
    batch_size: Literal["full"] | Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] = Field(
        default=32, description="number of queries of a step; full: all answered queries"
    )
    optimizer: OptimizerSettings = Field(
        default=SgdSettings(name="sgd", lr=0.1),
        description="the optimizer, with the keys of `local.optimizer`",
    )

    @property
    def local(self) -> LocalSettings:
        """The student's settings, in the form of the section `local` of an experiment."""
        return LocalSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            vectorized_clients="off",
        )


class PateSettings(Settings):
    """Settings of PATE: queries, noise and student (Confident-GNMax, Papernot et al. 2018)."""

    # Facts of the task; `FederatedTask` has the same names.
    saves_derived_model: ClassVar[bool] = True  # the student

    queries: int = Field(
        ge=1,
        le=MAX_EXAMPLES,
        description="public examples without labels on which the teachers vote, drawn from the "
        "test set by the seed; test scores leave them out",
    )
    answers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EXAMPLES,
        description="most queries that are answered: the first that pass the threshold; every "
        "client is charged for this number, however many pass; null: all queries",
    )
    threshold: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of the votes that the most frequent label needs in the noisy check, "
        "so that the query is answered",
    )
    sigma_threshold: float = Field(
        gt=0,
        description="standard deviation of the noise on each count in the check of a query, in "
        "votes; it is multiplied by the noise multiplier of `privacy`",
    )
    sigma: float = Field(
        gt=0,
        description="standard deviation of the noise on each count in the vote on an accepted "
        "query, in votes; it is multiplied by the noise multiplier of `privacy`",
    )
    student: StudentSettings = Field(
        default=StudentSettings(), description="training of the student on the answered queries"
    )

    @property
    def most_answers(self) -> int:
        """Largest number of queries that a run answers."""
        return self.queries if self.answers is None else self.answers

    def ballots(self, rounds: int) -> Ballots:
        """Return the number of queries and the noise level of each checking and each voting round.

        Each batch of queries has one checking round, then one voting round.

        Args:
            rounds: the setting `federation.rounds`, an even number; half of it is the number of
                batches.
        """
        batches = max(1, rounds // 2)
        return Ballots(
            Ballot(self.queries // batches, self.sigma_threshold),
            Ballot(self.most_answers // batches, self.sigma),
        )

    @property
    def votes(self) -> Mapping[str, Any]:
        """The settings `queries`, `answers`, `sigma_threshold` and `sigma`, as in `privacy.json`.

        The first two are numbers of queries; the last two are noise levels of vote counts.
        """
        return {
            "queries": self.queries,
            "answers": self.most_answers,
            "sigma_threshold": self.sigma_threshold,
            "sigma": self.sigma,
        }

    def work(self, rounds: int, local: LocalSettings) -> str:
        """Return a description of the run's work, for the first lines that a run prints.

        Args:
            rounds: number of rounds of the run.
            local: not used, as teachers train only once.
        """
        return (
            f"{self.queries:,} queries, at most {self.most_answers:,} answers, "
            f"{count_text(rounds, 'round')}"
        )
