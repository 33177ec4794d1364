"""Loading of the dataset, and its split into clients' examples and the server's test set.

Memory holds one copy of the dataset and the row numbers of each client. A client's examples are
copied only when the client trains. A dataset on disk (`numpy.load(..., mmap_mode="r")`) stays on
disk until then.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from fedsim.core.limits import MAX_CLASSES
from fedsim.core.streams import Purpose, stream
from fedsim.data.examples import DataError, Dataset, Examples, ExampleTransform
from fedsim.data.file_names import quoted
from fedsim.data.partitions.division import divide
from fedsim.data.settings import DataSettings
from fedsim.data.sources import load_dataset

DEFAULT_TEST_FRACTION = 0.2


def hold_out(
    dataset: Dataset, test_fraction: float | None, *, seed: int
) -> tuple[NDArray[np.int64], Examples]:
    """Split a dataset into training and test examples, and return both.

    The training examples are not copied, but returned as row numbers in `dataset.train`. Test
    examples are copied, unless the dataset has a test set in a separate array.

    Args:
        dataset: the data, with or without a test set.
        test_fraction: fraction of the examples to hold out, in (0, 1); None takes the dataset's
            test set, or 0.2 of the examples if it has none.
        seed: the experiment's seed.

    Raises:
        DataError: `test_fraction` is given for a dataset with a test set, or there are too few
            examples for a test set.
    """
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        if examples is not None and len(examples) == 0:
            raise DataError(f"there must be at least one {part} example, got none")
    if dataset.test is not None:
        if test_fraction is not None:
            raise DataError(
                "data.test_fraction must be left out for a dataset that brings its own test set, "
                f"got {test_fraction}"
            )
        return np.arange(len(dataset.train)), _on_its_own(dataset.test)
    fraction = DEFAULT_TEST_FRACTION if test_fraction is None else test_fraction
    train, test = split_indices(len(dataset.train), fraction, seed=seed)
    return train, dataset.train.rows(test)


def split_client(
    rows: NDArray[np.int64], fraction: float, *, seed: int, client: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (training rows, held-out rows) of a client, both sorted.

    Args:
        rows: row numbers of the client's examples, int64 (n,).
        fraction: fraction of the rows to hold out, in (0, 1). n * fraction is rounded, and at least
            one row remains for training.
        seed: the experiment's seed.
        client: number of the client.
    """
    num_held_out = min(round(len(rows) * fraction), max(len(rows) - 1, 0))
    order = stream(seed, Purpose.HELD_OUT, client=client).permutation(len(rows))
    return rows[np.sort(order[num_held_out:])], rows[np.sort(order[:num_held_out])]


def split_indices(
    num_examples: int, test_fraction: float, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted (training, test) indices of a random split, int64.

    Args:
        num_examples: number of examples n, at least 2.
        test_fraction: fraction of test examples, in (0, 1). n * test_fraction is rounded, and each
            part has at least one example.
        seed: the experiment's seed.

    Raises:
        DataError: there are fewer than two examples, or the fraction is outside (0, 1).
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction must be between 0 and 1, got {test_fraction}")
    if num_examples < 2:
        raise DataError(
            f"a test set needs at least 2 examples in all, got {num_examples}; "
            "add examples or bring a test set of your own"
        )
    num_test = min(max(round(num_examples * test_fraction), 1), num_examples - 1)
    order = stream(seed, Purpose.SPLIT).permutation(num_examples)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def _on_its_own(test: Examples) -> Examples:
    """Return the test set, copied if it is a view that would keep a larger array alive."""
    base = test.features.base
    is_part = type(base) is np.ndarray and base.nbytes > test.features.nbytes
    return Examples(test.features.copy(), test.targets.copy()) if is_part else test


Rows = NDArray[np.int64] | slice


@dataclass(frozen=True, eq=False)
class ClientExamples(Sequence[Examples]):
    """The examples of all clients, as a sequence in the order of client numbers.

    Each access gathers a client's examples from the dataset. A process may hold the examples of
    some clients only.

    Attributes:
        source: a dataset that contains the examples of all clients in `rows`.
        rows: row numbers in `source` of each client that this process holds.
        num_clients: number of clients of the federation; None if `rows` has all of them.
        transform: transform of the features, applied on each access (for a dataset on disk).
    """

    source: Examples
    rows: Mapping[int, Rows]
    num_clients: int | None = None
    transform: ExampleTransform | None = None

    @property
    def is_in_memory(self) -> bool:
        """Whether the examples are in memory, not in a memory-mapped file."""
        return self.source.is_in_memory

    @property
    def nbytes(self) -> int:
        """Size in bytes of the features and targets of the clients that this process holds."""
        row_bytes = [array[:1].nbytes for array in (self.source.features, self.source.targets)]
        return sum(self.sizes) * sum(row_bytes)

    @property
    def sizes(self) -> list[int]:
        """Numbers of examples of the clients in this process, in the order of client numbers."""
        return [self.size(client) for client in sorted(self.rows)]

    def size(self, client: int) -> int:
        """Return the number of examples of one client, whose examples this process must hold."""
        rows = self.rows[client]
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def targets(self, client: int) -> NDArray[np.generic]:
        """Return the targets (n,) or (n, k) of a client, whose examples this process must hold."""
        return self.source.targets[self.rows[client]]

    def __len__(self) -> int:
        return len(self.rows) if self.num_clients is None else self.num_clients

    @overload
    def __getitem__(self, index: int) -> Examples: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Examples]: ...
    def __getitem__(self, index: int | slice) -> Examples | Sequence[Examples]:
        """Return a client's examples.

        Raises:
            IndexError: no client has this number.
            KeyError: the client is in another process.
        """
        if isinstance(index, slice):
            return [self[client] for client in range(len(self))[index]]
        client = range(len(self))[index]
        if client not in self.rows:
            raise KeyError(f"the examples of client {client} are in another process")
        return self.source.rows(self.rows[client]).transformed(self.transform)

    def __iter__(self) -> Iterator[Examples]:
        """Yield the examples of each client of this process."""
        return (self[client] for client in sorted(self.rows))

    def select(self, clients: Iterable[int]) -> Self:
        """Return a new sequence that holds copies of the given clients' examples only."""
        chosen = list(clients)
        every = np.arange(len(self.source))
        indices = [every[self.rows[client]] for client in chosen]
        ends = np.cumsum([len(rows_of_client) for rows_of_client in indices]).tolist()
        starts = [0, *ends[:-1]]
        packed = self.source.rows(np.concatenate([*indices, np.empty(0, np.int64)]))
        packed = packed.transformed(self.transform)
        rows = {c: slice(a, b) for c, a, b in zip(chosen, starts, ends, strict=False)}
        return type(self)(packed, rows, num_clients=len(self))

    def copy(self) -> Self:
        """Return a new sequence with the same clients and a copy of the dataset."""
        source = Examples(self.source.features.copy(), self.source.targets.copy())
        return replace(self, source=source)


@dataclass(frozen=True)
class ExampleGroups:
    """The groups of the public test set, such as hospitals.

    Attributes:
        column: name of the column that names the groups.
        names: public name of the group of each test example.
    """

    column: str
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of one experiment, divided among clients and server.

    Attributes:
        clients: training examples of each client, by client number.
        test: the server's public test set, never on a client.
        num_classes: the number of classes: the number of class names, or if larger, one more than
            the largest class number in the whole dataset. It is assumed to be public. None if
            targets are not classes 0, 1, ...
        input_shape: shape of one example's features after `model.features`.
        raw_input_shape: shape of one example in the dataset, before transforms.
        held_out: examples of each client that are held out of training; None if there are none.
        class_names: name of each class, assumed to be public; None if the data do not name them.
        columns: names of the table columns that are features, in the order of the model's inputs. A
            column with classes gives one input for each class. None if the data are not a table.
        client_names: public name of each client, such as a hospital; None if clients have only
            numbers.
        test_groups: groups of the test examples, such as hospitals; None without groups.
    """

    clients: ClientExamples
    test: Examples
    num_classes: int | None
    input_shape: tuple[int, ...]
    raw_input_shape: tuple[int, ...]
    held_out: ClientExamples | None = None
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    client_names: tuple[str, ...] | None = None
    test_groups: ExampleGroups | None = None

    def with_test(self, rows: NDArray[np.int64]) -> Self:
        """Return the data, but with only the given rows of the test set."""
        groups = self.test_groups
        if groups is not None:
            groups = replace(groups, names=tuple(groups.names[row] for row in rows.tolist()))
        return replace(self, test=self.test.rows(rows), test_groups=groups)

    def copy(self) -> Self:
        """Return the data with copied examples of the clients, whose arrays may be written to."""
        held_out = None if self.held_out is None else self.held_out.copy()
        return replace(self, clients=self.clients.copy(), held_out=held_out)


def load_federated_data(
    settings: DataSettings,
    *,
    seed: int,
    base: Path,
    holdout: float | None = None,
    group: str | None = None,
    transform: ExampleTransform | None = None,
) -> FederatedData:
    """Load a dataset, hold out the test set and divide the rest among clients.

    Args:
        settings: the section `data` of the experiment.
        seed: the experiment's seed; the same file and seed give the same data on every client.
        base: the directory to which relative paths refer.
        holdout: fraction of the examples that each client keeps out of training, in (0, 1); None
            keeps none out.
        group: column of the data that divides the test set into groups; None divides it into none.
        transform: transform of the features of every example; None leaves features unchanged. It is
            applied once to a dataset in memory, and on each access to a dataset on disk.

    Raises:
        DataError: the data cannot be used; the message is one line with the fix.

    Example:
        >>> from pathlib import Path
        >>> from fedsim.data import load_federated_data
        >>> from fedsim.data.settings import DataSettings
        >>> settings = DataSettings.model_validate(
        ...     {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}}
        ... )
        >>> data = load_federated_data(settings, seed=0, base=Path())
        >>> data.clients.sizes, len(data.test)
        ([360, 360, 359, 359], 359)
    """
    dataset = load_dataset(settings, seed=seed, base=base)
    source, later = dataset.train, transform
    if source.is_in_memory:
        source, later = source.transformed(transform), None
    train, test = hold_out(dataset._replace(train=source), settings.test_fraction, seed=seed)
    if dataset.test is not None or later is not None:
        test = test.transformed(transform)
    parts, client_names = divide(dataset, train, settings.partition, seed=seed, base=base)
    rows, held_out = _split_clients(parts, holdout, seed=seed)
    raw_shape = dataset.train.input_shape
    shape = raw_shape if transform is None else transform.output_shape(raw_shape)
    return FederatedData(
        clients=ClientExamples(source, rows, transform=later),
        held_out=None if held_out is None else ClientExamples(source, held_out, transform=later),
        test=test,
        num_classes=_num_classes(dataset.train, test, dataset.class_names or ()),
        input_shape=shape,
        raw_input_shape=raw_shape,
        class_names=dataset.class_names,
        columns=dataset.columns,
        client_names=client_names,
        test_groups=None if group is None else _test_groups(dataset, train, group),
    )


def _split_clients(
    rows: Sequence[NDArray[np.int64]], holdout: float | None, *, seed: int
) -> tuple[dict[int, NDArray[np.int64]], dict[int, NDArray[np.int64]] | None]:
    """Return the rows on which each client trains, and those that it keeps out, if it does."""
    if holdout is None:
        return dict(enumerate(rows)), None
    splits = [split_client(kept, holdout, seed=seed, client=c) for c, kept in enumerate(rows)]
    training, held_out = zip(*splits, strict=True)
    return dict(enumerate(training)), dict(enumerate(held_out))


def _test_groups(dataset: Dataset, train: NDArray[np.int64], column: str) -> ExampleGroups:
    """Return the groups of the test examples, which are all rows except the training rows.

    Raises:
        DataError: the dataset has no such column, or brings a test set without groups.
    """
    if dataset.test is not None:
        raise DataError(
            f"evaluation.group: {column!r} divides test examples that are held out of the dataset, "
            "and this one brings a test set of its own; remove evaluation.group"
        )
    if column not in dataset.groups:
        raise DataError(
            f"evaluation.group: the dataset has no column {column!r} that names groups; it has "
            f"{quoted(list(dataset.groups)) or 'none'} (of a table, the column of data.partition)"
        )
    values = dataset.groups[column]
    test = np.setdiff1d(np.arange(len(values)), train)
    return ExampleGroups(column, tuple(str(values[row]) for row in test.tolist()))


def _num_classes(train: Examples, test: Examples, names: Sequence[str]) -> int | None:
    """Return the number of classes, from names and targets; None if targets are not classes.

    Raises:
        DataError: there are more than `MAX_CLASSES` classes.
    """
    if not train.has_classes or min(train.targets.min(), test.targets.min()) < 0:
        return None
    classes = max(int(train.targets.max()) + 1, int(test.targets.max()) + 1, len(names))
    if classes > MAX_CLASSES:
        raise DataError(
            f"the largest class is {classes - 1:,}, and a classifier has a score for each of "
            f"{classes:,} classes; number the classes 0, 1, 2, ... (at most {MAX_CLASSES:,}), or "
            "give numbers with a decimal point for regression"
        )
    return classes
