"""The server of a PATE run: public queries, public answers, and the tally of noisy votes.

The public answers take the place of the global model. The parameter `votes` has one row for each
query that a round asks, and is 0 at the start of every round. So a client's update is its votes.
The other tensors are the results of earlier rounds. All these values are computed from noisy votes
that were charged to the clients, so they are public.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.algorithms.algorithm import Algorithm, Update
from fedsim.algorithms.state import ServerState
from fedsim.clients.mechanisms.votes.ballots import Ballots
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL
from fedsim.core.streams import Purpose, stream
from fedsim.data import DataError, Examples, FederatedData

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


MIN_TEST_EXAMPLES = 2  # private models are checked on at least two examples


def with_queries(data: FederatedData, number: int, *, seed: int) -> tuple[FederatedData, Examples]:
    """Draw queries from the test set; return the data without these queries, and the queries.

    Queries keep their labels for the report. Clients and student never see the labels.

    Args:
        data: the data of the experiment.
        number: number of queries.
        seed: the experiment's seed, by which queries are drawn.

    Raises:
        DataError: too few test examples are left, or the targets are not classes.
    """
    if data.num_classes is None:
        raise DataError(
            "task: pate needs targets that are classes 0, 1, 2, ..., one for each example: "
            "teachers vote for classes"
        )
    left = len(data.test) - number
    if left < MIN_TEST_EXAMPLES:
        most = max(0, len(data.test) - MIN_TEST_EXAMPLES)
        raise DataError(
            f"pate.queries {number:,} of {len(data.test):,} public test examples leave {left:,} "
            f"for the test scores; ask at most {most:,}, raise data.test_fraction, or bring a "
            "larger test set"
        )
    order = stream(seed, Purpose.QUERIES).permutation(len(data.test))
    asked, rest = order[:number], np.sort(order[number:])
    return data.with_test(rest), data.test.rows(asked)


class Tally(Algorithm):
    """The server's algorithm of PATE: Confident-GNMax on noisy histograms of votes.

    The mean of the uploads is the mean of the clients' noisy votes. The results are post-processing
    of this mean. For each query, a checking round stores the largest vote share in the public
    tensors, and a voting round stores the most frequent label.

    Args:
        agenda: the rule that chooses the queries of each round.
        is_noisy: whether clients add noise to votes; uploads are then votes, divided by the noise
            level of the round (`Ballot.deviation`).
    """

    takes_weights = False

    def __init__(self, agenda: Agenda, *, is_noisy: bool) -> None:
        super().__init__()
        self._agenda, self._is_noisy = agenda, is_noisy

    def server(self, state: ServerState, update: Update) -> ServerState:
        """Return the server's state after the round, with the results in the public tensors.

        Args:
            state: the state before the round, with the public answers that clients received.
            update: the mean of the clients' uploads, which are their votes.
        """
        answers, number = state.values, state.round_number + 1
        unit = self._agenda.ballots.of_round(number).deviation if self._is_noisy else 1.0
        shares = update.mean[VOTES].astype(np.float64) * unit
        asked = self._agenda.asked(number, answers[SHARES])
        rows = np.flatnonzero(asked >= 0)
        values = {name: np.array(value) for name, value in answers.items()}
        if number % 2:
            values[SHARES][asked[rows]] = shares[rows].max(axis=1)
        else:
            values[LABELS][asked[rows]] = shares[rows].argmax(axis=1)
        return state.with_model(values)
