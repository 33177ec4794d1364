"""Public facts of the ballots of PATE, in a module without imports of torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ballot:
    """The size and the noise of a ballot, in which clients vote on public queries.

    Attributes:
        queries: largest number of queries that a client votes on.
        deviation: σ, standard deviation of the noise on each count at noise multiplier 1, in votes.
    """

    queries: int
    deviation: float


@dataclass(frozen=True)
class Ballots:
    """The two ballots of a run, which alternate: the check in odd rounds, the vote in even ones.

    Attributes:
        check: the ballot on all queries of a batch, which finds those that the teachers agree on.
        vote: the ballot on the accepted queries of the batch.
    """

    check: Ballot
    vote: Ballot

    def of_round(self, round_number: int) -> Ballot:
        """Return the ballot of a round; rounds count from 1."""
        return self.check if round_number % 2 else self.vote
