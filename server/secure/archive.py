"""Storage of the shares that the leader has added, until no client can be dropped any more."""

import tempfile
from typing import Protocol

import numpy as np

from fedsim.secagg.encoding import Ring


class ShareArchive(Protocol):
    """Stores each client's share, ring elements (d,)."""

    def keep(self, client: int, share: Ring) -> None:
        """Store the share of a client.

        Args:
            client: number of the client.
            share: ring elements (d,).
        """
        ...

    def recall(self, client: int) -> Ring:
        """Return the share of a client."""
        ...

    def clear(self) -> None:
        """Discard all shares."""
        ...


class MemoryArchive:
    """Stores references: no copies, but every share stays in memory."""

    def __init__(self) -> None:
        self._shares: dict[int, Ring] = {}

    def keep(self, client: int, share: Ring) -> None:
        """Store a reference to the share."""
        self._shares[client] = share

    def recall(self, client: int) -> Ring:
        """Return the share."""
        return self._shares[client]

    def clear(self) -> None:
        """Discard all shares."""
        self._shares.clear()


class FileArchive:
    """Writes shares to a temporary file without a name; memory stays O(d)."""

    def __init__(self, directory: str | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # lives as long as self
        self._places: dict[int, tuple[int, np.dtype, int]] = {}

    def keep(self, client: int, share: Ring) -> None:
        """Append the share to the file."""
        place = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(share).data.cast("B"))
        self._places[client] = (place, share.dtype, len(share))

    def recall(self, client: int) -> Ring:
        """Read the share back."""
        place, dtype, length = self._places[client]
        self._file.seek(place)
        return np.frombuffer(self._file.read(length * dtype.itemsize), dtype)

    def clear(self) -> None:
        """Empty the file."""
        self._places.clear()
        self._file.truncate(0)
