"""Every client's examples and the server's test set, loaded from `data:` of an experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fedsim.core.limits import MAX_CLASSES
from fedsim.data.client_examples import ClientExamples
from fedsim.data.examples import DataError, Examples, ExampleTransform
from fedsim.data.partitions.division import divide
from fedsim.data.settings import DataSettings
from fedsim.data.sources import load_dataset
from fedsim.data.splits import hold_out, split_client


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of one experiment.

    Attributes:
        clients: every client's training examples, by client number, gathered on access.
        test: the server's public test set, never on a client.
        num_classes: the number of named classes, or one more than the largest class of the whole
            dataset, assumed to be public; None if the targets are not classes 0, 1, 2, ...
        input_shape: shape of one example's features, as the model gets them.
        raw_input_shape: shape of one example in the dataset, before transforms.
        held_out: examples of every client that it never trains on; None without a holdout.
        class_names: name of each class, assumed to be public; None if the data do not name them.
        columns: the columns of a table that are features, in the order of the model's inputs (a
            column with classes has an input for each); None if the data are no table.
        client_names: public name of each client, such as a hospital; None: numbers alone.
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

    def copy(self) -> Self:
        """Return the same data with a writable copy of the clients' examples."""
        held_out = None if self.held_out is None else self.held_out.copy()
        return replace(self, clients=self.clients.copy(), held_out=held_out)


def load_federated_data(
    settings: DataSettings,
    *,
    seed: int,
    base: Path,
    holdout: float | None = None,
    transform: ExampleTransform | None = None,
) -> FederatedData:
    """Load a dataset, hold out the test set and divide the rest among clients.

    Args:
        settings: `data:` of the experiment.
        seed: the experiment's seed; the same file and seed give the same data on every client.
        base: the directory in which relative paths start.
        holdout: fraction of its examples that each client holds out, in (0, 1); None: no holdout.
        transform: of the features of every example; None: features stay as they are. In memory it
            is applied once, here; of a dataset on disk, to a client's examples when it trains.

    Raises:
        DataError: the data cannot be used; the message is one line with the fix.
    """
    dataset = load_dataset(settings, seed=seed, base=base)
    source, later = dataset.train, transform
    if source.is_in_memory:
        source, later = source.transformed(transform), None
    train, test = hold_out(dataset._replace(train=source), settings.test_fraction, seed=seed)
    if dataset.test is not None or later is not None:
        test = test.transformed(transform)
    division = divide(dataset, train, settings.partition, seed=seed, base=base)
    rows = dict(enumerate(division.rows))
    held_out = None
    if holdout is not None:
        splits = {c: split_client(own, holdout, seed=seed, client=c) for c, own in rows.items()}
        rows = {client: training for client, (training, _) in splits.items()}
        held_out = {c: rest for c, (_, rest) in splits.items()}
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
        client_names=division.names,
    )


def _num_classes(train: Examples, test: Examples, names: Sequence[str]) -> int | None:
    """Return one more than the largest class, named or seen; None for targets that are no classes.

    Raises:
        DataError: there would be more than `MAX_CLASSES`.
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
