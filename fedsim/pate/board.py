"""The board of a PATE run: the public tensors that the server sends to clients for a vote.

The board takes the place of the global model. Its trained tensor `votes` has a row for each query
of a ballot and is 0 at the start of every round: a client's update is its votes. The other tensors
are the results so far. All values on the board follow from charged releases and are public.
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
"""The share of votes of a query before its check, which is below every threshold."""


class Board(nn.Module):
    """The tensors of the board, as a torch module.

    Args:
        rows: number of queries of the largest ballot.
        queries: number of queries of the run.
        classes: number of classes.
    """

    def __init__(self, rows: int, queries: int, classes: int) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.zeros(rows, classes))
        self.register_buffer(SHARES, torch.full((queries,), NOT_CHECKED))
        self.register_buffer(LABELS, torch.full((queries,), NO_LABEL, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the votes; clients do not train a board."""
        return self.votes


@dataclass(frozen=True)
class Agenda:
    """Decides which queries a ballot asks, as a public function of the round and the board.

    Attributes:
        ballots: sizes and noise of the ballots.
        threshold: share of the votes that accepts a query.
    """

    ballots: Ballots
    threshold: float

    @property
    def rows(self) -> int:
        """Number of rows of the board, which is the number of queries of the largest ballot."""
        return max(self.ballots.check.queries, self.ballots.vote.queries)

    def asked(self, round_number: int, shares: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the query of each row of the board (rows,), or -1 for a row that asks nothing.

        A vote asks the first queries of a batch that passed the check, at most as many as every
        client is charged for. (Asking those with the clearest votes would select easy queries.)

        Args:
            round_number: number of the round from 1; odd rounds check, even rounds vote.
            shares: largest noisy share of votes of each query (queries,).
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


def shares_of(arrays: Mapping[str, np.ndarray]) -> NDArray[np.floating]:
    """Return the largest noisy share of votes of each query (queries,), from the board's arrays."""
    return arrays[SHARES]


def labels_of(arrays: Mapping[str, np.ndarray]) -> NDArray[np.int64]:
    """Return the label of each query (queries,), or `NO_LABEL` for a query without an answer."""
    return arrays[LABELS]
