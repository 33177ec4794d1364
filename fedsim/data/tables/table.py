"""A table on disk, read in blocks of rows: what .csv and .parquet files have in common."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedsim.data.examples import DataError
from fedsim.data.tables.column import Cells


@dataclass(frozen=True)
class Block:
    """Some rows of a table.

    Attributes:
        cells: the cells of each wanted column, n each.
        places: the place of each row in the file, as the file's kind counts: lines or rows.
    """

    cells: Mapping[str, Cells]
    places: Sequence[int]


class Table(Protocol):
    """A table with named columns."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order, each once."""
        ...

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Yield the cells of some columns, block by block.

        Raises:
            DataError: the file cannot be read.
        """
        ...

    def where(self, place: int) -> str:
        """Return the place of a row in words, for messages."""
        ...


def check_names(path: Path, header: Sequence[str]) -> None:
    """Check that every column has a name of its own.

    Args:
        path: the file.
        header: names of the columns.

    Raises:
        DataError: a name is empty or repeated.
    """
    if "" in header:
        raise DataError(
            f"{path}:1: column {list(header).index('') + 1} has no name; name or remove the column "
            "(pandas: to_csv(index=False))"
        )
    repeated = sorted(name for name, times in Counter(header).items() if times > 1)
    if repeated:
        raise DataError(f"{path}:1: two columns are named {repeated[0]!r}; rename or remove one")
