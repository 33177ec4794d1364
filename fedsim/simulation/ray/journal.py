"""Privacy ledger of a federation on several machines, written by a single process.

File locks do not work across machines. So one actor on the machine of the run directory writes the
file for all workers. A worker trains only after the actor has confirmed that its charge is on disk.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsim.accountant.ledger.journal import Charge, FileJournal, JournalError


class JournalActor:
    """Ray actor that is the only writer of a ledger file.

    Guarantee: when `append_all` returns, the charges are on disk. Appending them again changes
    nothing, so a caller that gets no reply may repeat the call.
    """

    def __init__(self, path: Path) -> None:
        self._journal = FileJournal(path)

    def history(self, client: int) -> tuple[Charge, ...]:
        """Return all charges of a client, oldest first."""
        return self._journal.history(client)

    def histories(self, clients: Sequence[int]) -> dict[int, tuple[Charge, ...]]:
        """Return a dictionary from client number to all charges of this client, oldest first."""
        return {client: self._journal.history(client) for client in clients}

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Write charges in order and force them to disk; charges already written change nothing.

        Raises:
            JournalError: a charge does not have its predecessor's hash; nothing was written.
        """
        self._journal.append_all([charge for charge in charges if not self._is_written(charge)])

    def _is_written(self, charge: Charge) -> bool:
        if charge.previous == self._journal.head(charge.client):
            return False  # it continues the chain, so the client's whole history need not be read
        written = self._journal.history(charge.client)
        # Only charges of the same round are hashed: a hash is computed when it is read.
        same_round = (
            past for past in reversed(written) if past.round_number == charge.round_number
        )
        return any(past.hash == charge.hash for past in same_round)


class RemoteJournal:
    """A worker's access to the ledger, which forwards calls to the `JournalActor`.

    Only one worker charges a client, so each client's number n of charges is cached here. Then
    `history` with `after=n` returns an empty tuple and does not call the actor. If another process
    charged the client, the actor refuses the next charge, as that has the wrong hash of the
    previous one; the cached number is then discarded. Charges are not cached: over many rounds they
    would outgrow the clients' data.

    Args:
        journal_actor: the handle of the actor.
        call: function that calls a method of the handle with one argument and returns the result.
        clients: the worker's clients; the first request for one history reads all histories.
    """

    def __init__(
        self, journal_actor: Any, call: Callable[[Any, object], Any], clients: Sequence[int] = ()
    ) -> None:
        self._journal_actor = journal_actor
        self._call = call
        self._prefetch = list(clients)
        self._unread: dict[int, tuple[Charge, ...]] = {}
        self._counts: dict[int, int] = {}

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first.

        Args:
            client: the client's number.
            after: the number of oldest charges to leave out.
        """
        if self._counts.get(client, after + 1) <= after:
            return ()
        if client in self._prefetch:
            clients, self._prefetch = self._prefetch, []
            self._unread = self._call(self._journal_actor.histories, clients)
        charges = self._unread.pop(client, None)
        if charges is None:
            charges = self._call(self._journal_actor.history, client)
        self._counts[client] = len(charges)
        return charges[after:]

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Write charges in order; when this method returns, they are on disk.

        Raises:
            JournalError: a charge lacks its predecessor's hash, or the actor is unreachable. After
                this error the clients must release nothing.
        """
        counts: dict[int, int] = {}
        for client in {charge.client for charge in charges}:
            self._unread.pop(client, None)
            if client in self._counts:
                counts[client] = self._counts.pop(client)
        self._call(self._journal_actor.append_all, list(charges))
        for charge in charges:
            if charge.client in counts:
                counts[charge.client] += 1
        self._counts |= counts


def call_actor(method: Any, argument: object) -> Any:
    """Call a method of an actor and return its result; if the method raises, raise its error.

    Args:
        method: the method of an actor's handle.
        argument: the only argument of the method.

    Raises:
        JournalError: the actor is unreachable.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    from fedsim.simulation.ray.session import FastPickle

    try:
        return ray.get(method.remote(FastPickle(argument)))
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise JournalError(f"the ledger's writer is unreachable: {error}") from error
