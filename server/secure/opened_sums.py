"""The record of opened sums: each round opens one client set only, even after a crash.

A sum is opened by the parties of secure aggregation, or by a server that adds its noise to it.

The difference of two sums of one round reveals updates of single clients. A run that died after its
server got a sum repeats the round when it resumes, under a new run id and with fresh secrets.
Clients repeat their answers, but others may drop out. Helpers know a round by its run id and cannot
notice. So the server writes the client set of each sum to disk before it opens the sum.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fedsim.secagg.errors import AlreadyAnsweredError


@dataclass(frozen=True)
class OpenedSum:
    """The record of one opened sum: its round and its client set.

    Attributes:
        round_number: the round, ≥ 1.
        clients: the clients in the sum; empty where participation is secret.
        digest: the keyed digest of the sum before the server's noise; "" where the server adds no
            noise, or noise that is never the same twice.
    """

    round_number: int
    clients: tuple[int, ...]
    digest: str = ""


def _discard(opened: OpenedSum) -> None:
    """Keep no record."""


@dataclass(frozen=True)
class OpenedSums:
    """Allows each round to open the sum of one client set only, also across processes.

    Guarantee: `record_opening` returns only after `save` has returned. It raises if an earlier
    process opened another client set of the same round. Within a process a round is opened once.
    A client set that a helper rejected was not opened; the smaller set replaces it.

    Attributes:
        previous: the last opened sum of an earlier process; None if there was none.
        save: writes the record of an opened sum to durable storage.
    """

    previous: OpenedSum | None = None
    save: Callable[[OpenedSum], None] = field(default=_discard)

    def admissible_clients(self, round_number: int) -> frozenset[int] | None:
        """Return the only client set whose sum this round may open, or None for any set."""
        if self.previous is None or self.previous.round_number != round_number:
            return None
        return frozenset(self.previous.clients)

    def record_opening(self, round_number: int, clients: Iterable[int], digest: str = "") -> None:
        """Record the client set of the sum that is opened next.

        Args:
            round_number: the round, ≥ 1.
            clients: the numbers of the clients in the sum.
            digest: the digest of the sum, where repeatable noise is added to it next; else "".

        Raises:
            AlreadyAnsweredError: the sum of another client set, or another sum of the same clients,
                was opened before.
        """
        before = self._digest_of(round_number)
        opened = OpenedSum(round_number, tuple(sorted(clients)), digest or before)
        admissible = self.admissible_clients(round_number)
        if admissible is not None and admissible != set(opened.clients):
            missing = sorted(admissible - set(opened.clients))
            raise AlreadyAnsweredError(
                f"before the run was interrupted, the sum of {len(admissible)} clients was "
                f"requested; clients {missing} of them are missing now, and a second sum would "
                "reveal single updates. Resume when they are back, or with on_abort: skip_round",
                round_number=round_number,
            )
        if before and digest and digest != before:
            raise AlreadyAnsweredError(
                "before the run was interrupted, noise was added to another sum of the same "
                "clients; the same noise on a second sum would reveal their difference",
                round_number=round_number,
            )
        self.save(opened)

    def _digest_of(self, round_number: int) -> str:
        """Return the digest of the round's sum that an earlier process opened, or ""."""
        same = self.previous is not None and self.previous.round_number == round_number
        return self.previous.digest if same and self.previous is not None else ""


NO_OPENED_SUMS = OpenedSums()
