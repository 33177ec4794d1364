"""Rows of many clients in one tensor: which rows are whose, and which clients go together.

The lots of the clients of a cohort have different lengths. They are laid one after the other, and
products of each client's rows with its own matrices are taken over runs of clients whose lots have
one length (`Together`), or client by client (`Apart`).

A client's results must not depend on who is beside it. So its products have the very shapes that
they have alone (they leave padding out: more rows could be summed in another order), and its rows
begin at a multiple of 64 bytes, as freshly allocated memory does: the matrix library takes other
paths through memory that is aligned otherwise. Hence the rows of each client are filled up to a
multiple of 16, and so are stacked parameters to a multiple of 16 values.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.products import (
    FEWEST_IN_BATCH,
    add_product,
    add_products,
    affine,
    is_special,
    product,
    products,
    shifted_products,
)

ALIGNMENT = 16  # of rows and of values: 64 bytes in float32, 128 in float64


class Ragged(ABC):
    """The layout of one step; clients without rows take no part in it.

    Args:
        lengths: number of rows of each client, in the order of the stacked parameters.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.clients: tuple[int, ...] = tuple(k for k, length in enumerate(lengths) if length)
        padding = [(n, aligned(n) - n) for n in lengths if n]
        self._sizes: tuple[int, ...] = tuple(chain.from_iterable(padding))
        self.rows: int = sum(self._sizes)

    @abstractmethod
    def products(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left_k · right_k of every client into its rows of `out`.

        Args:
            left: (rows · t, m), t rows for each example.
            right: (clients, m, n).
            out: (rows · t, n).
        """

    @abstractmethod
    def affine(self, x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
        """Write x_k W_kᵀ + b_k of every client into its rows of `out`.

        Args:
            x: (rows · t, m).
            w: (clients, n, m).
            b: (clients, n) or None.
            out: (rows · t, n).
        """

    def own_rows(self, values: Tensor) -> Sequence[Tensor]:
        """Return the rows (length · t, ...) of each client, without what fills up, as views."""
        repeats = len(values) // self.rows
        sizes = self._sizes if repeats == 1 else [size * repeats for size in self._sizes]
        return values.split_with_sizes(sizes)[::2]

    def per_row(self, values: Tensor) -> Tensor:
        """Return one value for each client (clients, ...) as one for each row (rows, ...)."""
        return values[torch.from_numpy(self.owners).to(values.device)]

    @cached_property
    def owners(self) -> np.ndarray:
        """The client of each row, for rows that only fill up, too."""
        return np.arange(len(self._lengths)).repeat([aligned(n) for n in self._lengths])

    @cached_property
    def real(self) -> np.ndarray:
        """Which rows are examples and do not only fill up."""
        return np.resize([True, False], len(self._sizes)).repeat(self._sizes)

    def each(self) -> Iterator[tuple[int, slice]]:
        """Yield every client that has rows, and these."""
        start = 0
        for client in self.clients:
            yield client, slice(start, start + self._lengths[client])
            start += aligned(self._lengths[client])


class Apart(Ragged):
    """Products client by client: for parameters that are dearer to copy than to multiply."""

    def products(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left_k · right_k of every client into its rows of `out`."""
        matrices = right.unbind()
        rows = zip(self.clients, self.own_rows(left), self.own_rows(out), strict=True)
        for client, own, own_out in rows:
            product(own, matrices[client], out=own_out)

    def affine(self, x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
        """Write x_k W_kᵀ + b_k of every client into its rows of `out`."""
        matrices, shifts = w.unbind(), [None] * len(w) if b is None else b.unbind()
        rows = zip(self.clients, self.own_rows(x), self.own_rows(out), strict=True)
        for client, own, own_out in rows:
            affine(own, matrices[client], shifts[client], out=own_out)


class Together(Ragged):
    """Batched products over neighbours whose lots have one length."""

    def products(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left_k · right_k of every client into its rows of `out`."""
        repeats, (m, n) = len(left) // self.rows, right.shape[1:]
        for run in self.runs:
            if _one_by_one(run, left, run.length * repeats, m, n):
                for k, rows in run.each(repeats):
                    product(left[rows], right[k], out=out[rows])
            else:
                products(run.of(left, repeats), right[run.clients], run.of(out, repeats))

    def affine(self, x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
        """Write x_k W_kᵀ + b_k of every client into its rows of `out`."""
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
                shifted_products(shifts, run.of(x, repeats), matrices, run.of(out, repeats))

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
                add_products(into[run.clients], a, b)

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

    @cached_property
    def runs(self) -> tuple["Run", ...]:
        """Neighbours of one length, in the order of their rows."""
        found: list[Run] = []
        client = row = 0
        while client < len(self._lengths):
            length, end = self._lengths[client], client + 1
            while end < len(self._lengths) and self._lengths[end] == length:
                end += 1
            if length:
                found.append(Run(slice(client, end), row, length))
                row += (end - client) * aligned(length)
            client = end
        return tuple(found)


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
        first, each, n = self.start * repeats, self.padded * repeats, values.shape[1]
        row, column = values.stride()
        size, strides = (self.count, self.length * repeats, n), (each * row, row, column)
        return values.as_strided(size, strides, values.storage_offset() + first * row)

    def each(self, repeats: int) -> Iterator[tuple[int, slice]]:
        """Yield every client and its own rows of (rows · t, n)."""
        for number, client in enumerate(range(self.clients.start, self.clients.stop)):
            start = (self.start + number * self.padded) * repeats
            yield client, slice(start, start + self.length * repeats)


def aligned(count: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _one_by_one(run: Run, like: Tensor, m: int, k: int, n: int) -> bool:
    """Tell whether products (count, m, k) · (count, k, n) must be taken one by one."""
    unlike = n == 1 or m * k * n < FEWEST_IN_BATCH  # batches of such round differently
    return run.count == 1 or unlike or is_special(like, m, k, n)
