"""The server of PATE, which turns noisy votes first into accepted queries and then into labels."""

import numpy as np

from fedsim.algorithms.algorithm import Algorithm, Update
from fedsim.algorithms.state import ServerState
from fedsim.pate.public_answers import LABELS, SHARES, VOTES, Agenda


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
