"""Public sizes and noise of PATE's ballots, in a module that does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ballot:
    """Size and noise of a ballot: one round in which clients vote on public queries.

    Attributes:
        queries: largest number of queries that a client votes on.
        deviation: standard deviation σ of the noise on each count, in votes, if the noise
            multiplier is 1.
    """

    queries: int
    deviation: float


@dataclass(frozen=True)
class Ballots:
    """The two ballots of a run: a check in odd rounds, and a vote in even rounds.

    Attributes:
        check: the ballot in which clients vote on all queries of a batch, to find those on which
            they agree.
        vote: the ballot in which clients vote on the accepted queries of the batch.
    """

    check: Ballot
    vote: Ballot

    def of_round(self, round_number: int) -> Ballot:
        """Return the ballot for the round with the given number, from 1."""
        return self.check if round_number % 2 else self.vote
