"""Which sums were opened: of one round, no second sum over other clients, not even after a crash.

Two sums of one round differ by single clients' updates. Within a run a round is opened once. But a
run that died after its server got a sum repeats the round when it is resumed, under a new run id
with fresh secrets; clients repeat their answers, and who survives may be others. Helpers cannot
see that: they know the round by its run. So the server writes down whose sum it is about to ask
for, on disk, before it asks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fedsim.secagg.errors import AlreadyAnsweredError


@dataclass(frozen=True)
class OpenedSum:
    """The clients whose sum was asked for in a round."""

    round_number: int
    clients: tuple[int, ...]


def _nothing(opening: OpenedSum) -> None:
    """Keep no record."""


@dataclass(frozen=True)
class OpenedSums:
    """Lets each round be opened for one set of clients only.

    Guarantee: `about_to_open` returns only after `record` has, and raises where an earlier process
    asked for the sum of this round over other clients. Within a process a round is opened once;
    a set that a helper rejected was not opened, and the smaller one takes its place.

    Attributes:
        before: the last opening of an earlier process; None: there was none.
        record: writes an opening down, durably.
    """

    before: OpenedSum | None = None
    record: Callable[[OpenedSum], None] = field(default=_nothing)

    def admitted(self, round_number: int) -> frozenset[int] | None:
        """Return the clients whose sum this round may open; None: any."""
        if self.before is None or self.before.round_number != round_number:
            return None
        return frozenset(self.before.clients)

    def about_to_open(self, round_number: int, clients: Iterable[int]) -> None:
        """Take note that a sum of these clients is asked for next.

        Raises:
            AlreadyAnsweredError: a sum over other clients was asked for before.
        """
        opening = OpenedSum(round_number, tuple(sorted(clients)))
        admitted = self.admitted(round_number)
        if admitted is not None and admitted != set(opening.clients):
            gone = sorted(admitted - set(opening.clients))
            raise AlreadyAnsweredError(
                f"before the run was interrupted, the sum of {len(admitted)} clients was asked "
                f"for, and of these {gone} are missing now; a second sum would reveal single "
                "updates. Resume when they are back, or with on_abort: skip_round",
                round_number=round_number,
            )
        self.record(opening)


NO_OPENED_SUMS = OpenedSums()
