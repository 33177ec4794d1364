"""Public facts of the ballots of PATE, light enough for settings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ballot:
    """Public facts of one kind of ballot.

    Attributes:
        queries: most queries that a client votes on.
        deviation: standard deviation of the noise on each count at noise multiplier 1, in votes.
    """

    queries: int
    deviation: float


@dataclass(frozen=True)
class Ballots:
    """The ballots of a run: the check in odd rounds, the vote in even ones.

    Attributes:
        check: all queries of a batch.
        vote: the accepted queries of the batch.
    """

    check: Ballot
    vote: Ballot

    def of_round(self, round_number: int) -> Ballot:
        """Return the ballot of a round, 1 for the first."""
        return self.check if round_number % 2 else self.vote
