"""The public answers of a PATE run: the tensors that the server sends to clients for a vote.

These tensors take the place of the global model. The parameter `votes` has one row for each query
that a round asks, and is 0 at the start of every round. So a client's update is its votes.
The other tensors are the results of earlier rounds. All these values are computed from noisy votes
that were charged to the clients, so they are public.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.clients.mechanisms.votes.ballots import Ballots
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL

VOTES, SHARES, LABELS = "votes", "shares", "labels"
NOT_CHECKED = -1e30
"""Vote share that stands for a query that was not checked yet; it is below every threshold."""


class PublicAnswers(nn.Module):
    """The public tensors of a PATE run (votes, shares and labels), as a torch module.

    Args:
        rows: largest number of queries that a round asks.
        queries: number of queries of the whole run.
        classes: number of classes.
    """

    def __init__(self, rows: int, queries: int, classes: int) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.zeros(rows, classes))
        self.register_buffer(SHARES, torch.full((queries,), NOT_CHECKED))
        self.register_buffer(LABELS, torch.full((queries,), NO_LABEL, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the tensor `votes` (rows, classes). Training never calls this method."""
        return self.votes


@dataclass(frozen=True)
class Agenda:
    """The public rule that chooses the queries of each round, given the results so far.

    Attributes:
        ballots: number of queries and noise level of the checking rounds (odd) and of the voting
            rounds (even).
        threshold: share of the votes that a query's most frequent label needs to pass the check.
    """

    ballots: Ballots
    threshold: float

    @property
    def rows(self) -> int:
        """Largest number of queries that a round asks, which is the number of rows of `votes`."""
        return max(self.ballots.check.queries, self.ballots.vote.queries)

    def asked(self, round_number: int, shares: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the index of the query for each row of `votes`, (rows,); -1 for an unused row.

        A voting round asks only queries that passed the check in the previous round. If more passed
        than clients are charged for, the first of them are asked. (To ask those with the clearest
        votes would select easy queries.)

        Args:
            round_number: number of the round from 1; odd rounds are checks, even rounds are votes.
            shares: noisy share of votes of the most frequent label of each query (queries,).
        """
        size = self.ballots.check.queries
        start = (round_number - 1) // 2 * size
        chosen = np.arange(start, start + size)
        if round_number % 2 == 0:
            passed = chosen[shares[chosen] >= self.threshold]
            chosen = passed[: self.ballots.vote.queries]
        queries = np.full(self.rows, -1, dtype=np.int64)
        queries[: len(chosen)] = chosen
        return queries
