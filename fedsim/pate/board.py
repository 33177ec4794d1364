"""The board of a run: what the server sends to every client, and what clients vote on.

It takes the place of the global model. Its trained tensor `votes` has a row for each query of a
ballot and is 0 at the start of every round: a client's update is its votes. The other tensors are
the results so far. Everything on it follows from charged releases, and is public.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.clients.mechanisms.votes.ballots import Ballots
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL

VOTES, SHARES, LABELS = "votes", "shares", "labels"
NOT_CHECKED = -1e30
"""Share of a query that no check has seen yet: below every threshold."""


class Board(nn.Module):
    """Tensors of the board.

    Args:
        rows: queries of the largest ballot.
        queries: queries of the run.
        classes: number of classes.
    """

    def __init__(self, rows: int, queries: int, classes: int) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.zeros(rows, classes))
        self.register_buffer(SHARES, torch.full((queries,), NOT_CHECKED))
        self.register_buffer(LABELS, torch.full((queries,), NO_LABEL, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the counts: no client trains a board."""
        return self.votes


@dataclass(frozen=True)
class Agenda:
    """Which queries a ballot asks: a public function of the round and the board.

    Attributes:
        ballots: sizes of the ballots.
        threshold: share of the votes that accepts a query.
    """

    ballots: Ballots
    threshold: float

    @property
    def rows(self) -> int:
        """Rows of the board."""
        return max(self.ballots.check.queries, self.ballots.vote.queries)

    def asked(self, round_number: int, shares: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the query of each row of the board (rows,); -1: the row asks nothing.

        Of the queries of a batch that passed its check the first are asked, at most as many as
        every client is charged for. (Those with the clearest votes would be the easy ones alone.)

        Args:
            round_number: from 1; odd rounds check, even rounds vote.
            shares: largest noisy share of the votes of each query (queries,).
        """
        size = self.ballots.check.queries
        start = (round_number - 1) // 2 * size
        chosen = np.arange(start, start + size)
        if round_number % 2 == 0:
            passed = chosen[shares[chosen] >= self.threshold]
            chosen = passed[: self.ballots.vote.queries]
        found = np.full(self.rows, -1, dtype=np.int64)
        found[: len(chosen)] = chosen
        return found


def shares_of(arrays: Mapping[str, np.ndarray]) -> NDArray[np.floating]:
    """Return the largest noisy share of each query's votes, from the board's arrays."""
    return arrays[SHARES]


def labels_of(arrays: Mapping[str, np.ndarray]) -> NDArray[np.int64]:
    """Return the label of each query (queries,); `NO_LABEL`: it has no answer."""
    return arrays[LABELS]
