"""Stragglers of each round: clients that do a part of their local work (Li et al. 2020, FedProx).

Who straggles, and how many steps it takes, follows from the seed: public facts, like the schedule.
"""

from dataclasses import dataclass

import numpy as np

from fedsim.core.streams import Purpose, stream


@dataclass(frozen=True)
class Stragglers:
    """The stragglers of each round and their numbers of steps.

    Attributes:
        seed: the experiment's seed.
        share: share of the clients of a round that straggle, to the nearest whole number.
    """

    seed: int
    share: float

    def count(self, clients: int) -> int:
        """Return the number of stragglers among the clients of a round."""
        return min(clients, int(self.share * clients + 0.5))

    def among(self, clients: tuple[int, ...], round_number: int) -> frozenset[int]:
        """Return the stragglers of a round, each set as likely as another.

        Args:
            clients: the clients of the round, ascending.
            round_number: the round >= 1.
        """
        number = self.count(len(clients))
        if number == len(clients):
            return frozenset(clients)
        generator = stream(self.seed, Purpose.PARTIAL_WORK, round_number=round_number)
        places = generator.choice(len(clients), number, replace=False)
        return frozenset(np.array(clients)[places].tolist())

    def steps(self, client: int, round_number: int, whole: int) -> int:
        """Return the steps of a straggler: uniform from 1 to one less than a whole round's.

        A round of one step cannot be divided: it is whole.

        Args:
            client: its number.
            round_number: the round >= 1.
            whole: steps of its whole round.
        """
        if whole < 2:
            return whole
        # Client 0 has the stream of the stragglers' draw: clients begin at 1.
        key = {"client": client + 1, "round_number": round_number}
        return int(stream(self.seed, Purpose.PARTIAL_WORK, **key).integers(1, whole))
