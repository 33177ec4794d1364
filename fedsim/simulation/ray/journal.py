"""The durable ledger of a federation on several machines: written in one place, by one process.

A ledger is a file, and a file lock does not reach over machines. So one actor on the machine of the
run directory keeps the file, and every worker asks it. A worker trains only after the keeper said
that the charge is on disk.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError


class JournalKeeper:
    """The one writer of a ledger file; an actor.

    Guarantee: when `append` returns, the charge is on disk. The same charge again changes nothing,
    so a caller who never heard the answer may ask again.
    """

    def __init__(self, path: Path) -> None:
        self._journal = FileJournal(path)

    def history(self, client: int) -> tuple[Charge, ...]:
        """Return every charge of a client, oldest first."""
        return self._journal.history(client)

    def histories(self, clients: Sequence[int]) -> dict[int, tuple[Charge, ...]]:
        """Return every charge of each of the clients."""
        return {client: self._journal.history(client) for client in clients}

    def append(self, charge: Charge) -> None:
        """Write a charge and force it to disk.

        Raises:
            JournalError: it does not continue its client's chain.
        """
        self.append_all([charge])

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Write charges in their order and force them to disk; those that are there change nothing.

        Raises:
            JournalError: one does not continue its client's chain; then none was written.
        """
        self._journal.append_all([charge for charge in charges if not self._is_written(charge)])

    def _is_written(self, charge: Charge) -> bool:
        if charge.previous == self._journal.head(charge.client):
            return False  # it continues the chain: nobody need read the client's whole history
        there = self._journal.history(charge.client)
        same_round = (one for one in reversed(there) if one.round_number == charge.round_number)
        return any(one.hash == charge.hash for one in same_round)  # hashes are made when asked for


class RemoteJournal:
    """The journal of a worker: asks the keeper.

    How many charges a client has is remembered, since it is charged by the worker that it is pinned
    to: whoever knows of as many (`after`) is told at once that there are no more. If another
    process charged it meanwhile, the keeper refuses the next charge, which would not continue the
    chain, and the number is forgotten. The charges themselves are not kept: over many rounds they
    would be more than the clients' data.

    Args:
        keeper: handle of the actor.
        ask: sends a method of the handle its argument and waits for the answer.
        clients: those of the worker; their histories are asked for together, when one is needed.
    """

    def __init__(
        self, keeper: Any, ask: Callable[[Any, object], Any], clients: Sequence[int] = ()
    ) -> None:
        self._keeper = keeper
        self._ask = ask
        self._first = list(clients)
        self._unread: dict[int, tuple[Charge, ...]] = {}
        self._counts: dict[int, int] = {}

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client after its first `after` ones, oldest first."""
        if self._counts.get(client, after + 1) <= after:
            return ()
        if client in self._first:
            asked, self._first = self._first, []
            self._unread = self._ask(self._keeper.histories, asked)
        charges = self._unread.pop(client, None)
        if charges is None:
            charges = self._ask(self._keeper.history, client)
        self._counts[client] = len(charges)
        return charges[after:]

    def append(self, charge: Charge) -> None:
        """Have a charge written; when this returns, it is on disk.

        Raises:
            JournalError: it does not continue its client's chain, or the keeper is gone. Then
                nothing may be released.
        """
        self.append_all([charge])

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Have charges written in their order; when this returns, they are on disk.

        Raises:
            JournalError: as `append`.
        """
        counts: dict[int, int] = {}
        for client in {charge.client for charge in charges}:
            self._unread.pop(client, None)
            if client in self._counts:
                counts[client] = self._counts.pop(client)
        self._ask(self._keeper.append_all, list(charges))
        for charge in charges:
            if charge.client in counts:
                counts[charge.client] += 1
        self._counts |= counts


def ask(method: Any, argument: object) -> Any:
    """Call a method of an actor and wait; an error of the method is raised as it was there.

    Raises:
        JournalError: the actor could not be reached.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    from fedsim.simulation.ray.fast_pickle import Packed

    try:
        return ray.get(method.remote(Packed(argument)))
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise JournalError(f"the keeper of the ledger cannot be reached: {error}") from error
