"""Record of the sums that a server learned: it lets only one client set per round be summed.

A sum is opened when the parties of secure aggregation reveal it to the server. A server that adds
noise to a sum of integers opens that sum too.

The difference of two sums of one round reveals updates of single clients. A run may die after the
server has learned a sum. When the run resumes, it repeats the round under a new run id and with
fresh secrets. Clients repeat their answers, but different clients may drop out. Helpers know a
round by its run id and cannot notice. So the server writes the client set of each sum to disk
before it learns the sum.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fedsim.secagg.errors import AlreadyAnsweredError


@dataclass(frozen=True)
class OpenedSum:
    """Record of one sum that the server learned: its round and its clients.

    Attributes:
        round_number: the round, ≥ 1.
        clients: the clients in the sum; empty if participation is secret.
        digest: the keyed digest of the sum before the server's noise. The value is "" if the server
            adds no noise, or noise that never repeats.
    """

    round_number: int
    clients: tuple[int, ...]
    digest: str = ""


def _discard(opened: OpenedSum) -> None:
    """Keep no record."""


@dataclass(frozen=True)
class OpenedSums:
    """Guard that lets the server learn the sum of only one client set per round.

    Guarantee: `record_opening` returns only after `save` has returned. It raises if an earlier
    process opened the sum of another client set in the same round. Within a process, a round's sum
    is opened once. If a helper rejects clients, no sum was opened yet, and the smaller client set
    is recorded next.

    Attributes:
        previous: the last opened sum of an earlier process; None if there was none.
        save: function that writes the record of an opened sum to disk.
    """

    previous: OpenedSum | None = None
    save: Callable[[OpenedSum], None] = field(default=_discard)

    def admissible_clients(self, round_number: int) -> frozenset[int] | None:
        """Return the only client set whose sum the server may learn; None if any set is allowed."""
        before = self._opened_before(round_number)
        return None if before is None else frozenset(before.clients)

    def record_opening(self, round_number: int, clients: Iterable[int], digest: str = "") -> None:
        """Record the client set of a sum before the server opens the sum.

        Args:
            round_number: the round, ≥ 1.
            clients: the numbers of the clients in the sum.
            digest: the digest of the sum if the server adds repeatable noise to it; else "".

        Raises:
            AlreadyAnsweredError: an earlier process opened a sum of other clients, or another sum
                of the same clients, in this round.
        """
        last = self._opened_before(round_number)
        before = "" if last is None else last.digest
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

    def _opened_before(self, round_number: int) -> OpenedSum | None:
        """Return the round's sum that an earlier process opened, or None."""
        last = self.previous
        return last if last is not None and last.round_number == round_number else None


NO_OPENED_SUMS = OpenedSums()
