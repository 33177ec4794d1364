"""Rows of many clients in one tensor: which rows are whose, and which clients go together.

The lots of the clients of a cohort have different lengths. They are laid one after the other,
clients with lots of one length next to each other: such a run of clients is one batched product.

A client's results must not depend on who is beside it. So its products have the very shapes that
they have alone (they leave padding out: more rows could be summed in another order), and its rows
begin at a multiple of 64 bytes, as freshly allocated memory does: the matrix library takes other
paths through memory that is aligned otherwise. Hence the rows of each client are filled up to a
multiple of 16, and so are stacked parameters to a multiple of 16 values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.dp_sgd.products import add_product, affine, is_special, product

ALIGNMENT = 16  # of rows and of values: 64 bytes in float32, 128 in float64

# torch multiplies batches of matrices of fewer products than this by a loop of its own, whose sums
# are in another order than those of a single product.
_FEWEST_PRODUCTS = 400


@dataclass(frozen=True)
class Run:
    """Neighbouring clients with lots of one length.

    Attributes:
        clients: their places in the stacked parameters.
        start: their first row.
        length: of each one's lot.
    """

    clients: slice
    start: int
    length: int

    @cached_property
    def count(self) -> int:
        """Number of clients."""
        return self.clients.stop - self.clients.start

    @cached_property
    def padded(self) -> int:
        """Rows of each client, those included that only fill up."""
        return aligned(self.length)

    def of(self, values: Tensor, repeats: int) -> Tensor:
        """Return the clients' own rows (count, length · t, n) of (rows · t, n)."""
        first, each = self.start * repeats, self.padded * repeats
        block = values[first : first + self.count * each].view(self.count, each, -1)
        return block[:, : self.length * repeats]

    def each(self, repeats: int) -> Iterator[tuple[int, slice]]:
        """Yield every client and its own rows of (rows · t, n)."""
        for number, client in enumerate(range(self.clients.start, self.clients.stop)):
            start = (self.start + number * self.padded) * repeats
            yield client, slice(start, start + self.length * repeats)


@dataclass(frozen=True)
class Ragged:
    """The layout of one step: the runs in their order; clients without rows are in none.

    Attributes:
        runs: in the order of their rows.
        rows: of all clients, those included that only fill up.
    """

    runs: tuple[Run, ...]
    rows: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, together: bool) -> "Ragged":
        """Return the layout of lots with these lengths, client by client.

        Args:
            lengths: number of rows of each client, in the order of the stacked parameters.
            together: neighbours of one length make one run; else each client is alone.
        """
        runs: list[Run] = []
        client = row = 0
        while client < len(lengths):
            length, end = lengths[client], client + 1
            while together and end < len(lengths) and lengths[end] == length:
                end += 1
            if length:
                runs.append(Run(slice(client, end), row, length))
                row += (end - client) * aligned(length)
            client = end
        return cls(tuple(runs), row)

    def products(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left_k · right_k of every client into its rows of `out`.

        Args:
            left: (rows · t, m), t rows for each example.
            right: (clients, m, n).
            out: (rows · t, n).
        """
        repeats, (m, n) = len(left) // self.rows, right.shape[1:]
        for run in self.runs:
            if _one_by_one(run, left, run.length * repeats, m, n):
                for k, rows in run.each(repeats):
                    product(left[rows], right[k], out=out[rows])
            else:
                torch.bmm(run.of(left, repeats), right[run.clients], out=run.of(out, repeats))

    def affine(self, x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
        """Write x_k W_kᵀ + b_k of every client into its rows of `out`.

        Args:
            x: (rows · t, m).
            w: (clients, n, m).
            b: (clients, n) or None.
            out: (rows · t, n).
        """
        if b is None:
            self.products(x, w.transpose(1, 2), out)
            return
        repeats, (n, m) = len(x) // self.rows, w.shape[1:]
        for run in self.runs:
            if _one_by_one(run, x, run.length * repeats, m, n):
                for k, rows in run.each(repeats):
                    affine(x[rows], w[k], b[k], out=out[rows])
            else:
                shifts, matrices = b[run.clients].unsqueeze(1), w[run.clients].transpose(1, 2)
                torch.baddbmm(shifts, run.of(x, repeats), matrices, out=run.of(out, repeats))

    def add_outer(self, left: Tensor, right: Tensor, into: Tensor) -> None:
        """Add left_kᵀ · right_k of every client to `into[k]`.

        Args:
            left: (rows · t, m).
            right: (rows · t, n).
            into: (clients, m, n).
        """
        repeats, (m, n) = len(left) // self.rows, into.shape[1:]
        for run in self.runs:
            if _one_by_one(run, left, m, run.length * repeats, n):
                for k, rows in run.each(repeats):
                    add_product(into[k], left[rows].t(), right[rows])
            else:
                a, b = run.of(left, repeats).transpose(1, 2), run.of(right, repeats)
                into[run.clients].baddbmm_(a, b)

    def outer(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left_kᵀ · right_k of every client to `out[k]`, as of `add_outer`.

        Not the same as adding to zeros, and not to be written anywhere: alone, such a product goes
        to freshly allocated memory, and the library sums in another order elsewhere.
        """
        repeats, (m, n) = len(left) // self.rows, out.shape[1:]
        for run in self.runs:
            fresh = out.new_empty(run.count, aligned(m * n))[:, : m * n].view(run.count, m, n)
            if _one_by_one(run, left, m, run.length * repeats, n):
                for own, (_, rows) in zip(fresh, run.each(repeats), strict=True):
                    product(left[rows].t(), right[rows], out=own)
            else:
                a, b = run.of(left, repeats).transpose(1, 2), run.of(right, repeats)
                torch.bmm(a, b, out=fresh)
            out[run.clients] = fresh

    def add_sums(self, values: Tensor, into: Tensor) -> None:
        """Add the sum of every client's rows of `values` (rows · t, n) to `into[k]` (n,)."""
        repeats = len(values) // self.rows
        for run in self.runs:
            if run.count == 1:
                for k, rows in run.each(repeats):
                    into[k].add_(values[rows].sum(0))
            else:
                into[run.clients].add_(run.of(values, repeats).sum(1))

    def per_row(self, values: Tensor) -> Tensor:
        """Return one value for each client (clients, ...) as one for each row (rows, ...)."""
        return values[torch.from_numpy(self.owners).to(values.device)]

    @cached_property
    def owners(self) -> np.ndarray:
        """The client of each row, for rows that only fill up, too."""
        parts = [np.arange(*run.clients.indices(1 << 62)).repeat(run.padded) for run in self.runs]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @cached_property
    def real(self) -> np.ndarray:
        """Which rows are examples and do not only fill up."""
        parts = [np.tile(np.arange(run.padded) < run.length, run.count) for run in self.runs]
        return np.concatenate(parts) if parts else np.empty(0, dtype=bool)

    def each(self) -> Iterator[tuple[int, slice]]:
        """Yield every client that has rows, and these."""
        for run in self.runs:
            yield from run.each(1)


def aligned(count: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _one_by_one(run: Run, like: Tensor, m: int, k: int, n: int) -> bool:
    """Tell whether products (count, m, k) · (count, k, n) must be taken one by one."""
    return run.count == 1 or m * k * n < _FEWEST_PRODUCTS or is_special(like, m, k, n)
