"""From `data:` of an experiment to every client's examples and the server's test set."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fedsim.data.examples import Examples
from fedsim.data.partitions import partition
from fedsim.data.settings import DataSettings
from fedsim.data.shares import ClientShares
from fedsim.data.sources import load_dataset
from fedsim.data.splits import held_out, hold_out


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of one experiment.

    Attributes:
        clients: every client's training examples, by client number, gathered when asked.
        test: the server's public test set, never on a client.
        num_classes: one more than the largest class in the whole dataset, which the experiment
            takes as publicly known; None if the targets are not classes 0, 1, 2, ...
        input_shape: shape of one example's features.
        held_out: every client's examples that it never trains on; None where there are none.
    """

    clients: ClientShares
    test: Examples
    num_classes: int | None
    input_shape: tuple[int, ...]
    held_out: ClientShares | None = None

    @property
    def train_examples(self) -> int:
        """Number of training examples over all clients."""
        return sum(self.clients.sizes)

    def copied(self) -> Self:
        """Return the same data with clients' examples in memory of their own."""
        kept = None if self.held_out is None else self.held_out.copied()
        return replace(self, clients=self.clients.copied(), held_out=kept)


def load_federated_data(
    settings: DataSettings, *, seed: int, base: Path, holdout: float | None = None
) -> FederatedData:
    """Load, hold out the test set and divide the rest among clients.

    Args:
        settings: `data:` of the experiment.
        seed: the experiment's seed; the same file and seed give the same data on every client.
        base: the directory of the experiment file, which paths are relative to.
        holdout: share of its examples that each client holds out; None: none.

    Raises:
        DataError: with one line that says what is wrong and how to mend it.
    """
    dataset = load_dataset(settings, seed=seed, base=base)
    train, test = hold_out(dataset, settings.test_fraction, seed=seed)
    shares = partition(dataset.train.targets[train], settings.partition, seed)
    rows = {client: train[share] for client, share in enumerate(shares)}
    kept = None
    if holdout is not None:
        parts = {c: held_out(own, holdout, seed=seed, client=c) for c, own in rows.items()}
        rows = {client: training for client, (training, _) in parts.items()}
        kept = ClientShares(dataset.train, {client: rest for client, (_, rest) in parts.items()})
    return FederatedData(
        clients=ClientShares(dataset.train, rows),
        held_out=kept,
        test=test,
        num_classes=_num_classes(dataset.train, test),
        input_shape=dataset.train.input_shape,
    )


def _num_classes(train: Examples, test: Examples) -> int | None:
    if not train.has_classes or min(train.targets.min(), test.targets.min()) < 0:
        return None
    return int(max(train.targets.max(), test.targets.max())) + 1
