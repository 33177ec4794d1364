"""Sources of batches for a training loop: tensors in memory, or a data loader's dataset."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from fedsim.clients.privacy_engine.batch_schedule import Batch, BatchSchedule, EpochError
from fedsim.clients.privacy_engine.forward_checks import map_tensors
from fedsim.core.errors import FedsimError


class SkippedBatchError(FedsimError, RuntimeError):
    """Error for a batch that was drawn but used in no optimizer step."""


class BatchReuseError(FedsimError, RuntimeError):
    """Error if the examples of the backward passes are not exactly those of the drawn batch."""


class BatchFeed:
    """Source of a training loop's batches, which checks that each is used and released once.

    A batch here is a logical batch; it is split into parts, which are the physical batches.

    Guarantee: if a batch is released, exactly as many examples passed through backward passes as
    were drawn. This holds for each part; only forward passes after the part was yielded count.

    Args:
        schedule: object that draws the batches.
        max_physical_batch: largest number of examples in a part; None to leave batches whole.
        drop: function that drops a batch's sum; called if the loop stops before the batch ends.

    Attributes:
        schedule: object that draws the batches.
        most: largest number of examples in a part from the next batch on; None for no limit.
        parts_left: number of parts of the current batch that are not yielded yet.
        part: number of the part that was yielded last; 0 outside a loop.
    """

    def __init__(
        self,
        schedule: BatchSchedule,
        max_physical_batch: int | None,
        drop: Callable[[], None],
    ) -> None:
        self.schedule = schedule
        self.parts_left = self.part = 0
        self._parts_given = 0  # over all batches
        self.most, self._drop = max_physical_batch, drop
        self._current: Batch | None = None
        self._is_looping = False  # whether the loop that asked for the current batch goes on
        self._drawn = self._used = 0  # numbers of examples of the current part

    def take(self) -> Batch | None:
        """Return the current batch and mark it as used; None if the batch is of another loader."""
        batch, self._current = self._current, None
        if not self._is_looping:
            self.part = 0
        return batch

    def count(self, examples: int, part: int, *, has_views: bool = False) -> None:
        """Add the examples of a backward pass to a count; raise if it exceeds the drawn batch.

        Args:
            examples: number of examples in the pass.
            part: value of the attribute `part` at the time of the forward pass.
            has_views: whether each example has several rows. All rows must then be in one pass,
                because several passes on one view each would have as many rows in total.

        Raises:
            BatchReuseError: there are more examples than were drawn, or they belong to another
                part, or to a batch that is already released.
        """
        if part != self.part:
            raise BatchReuseError(
                "a forward pass was made before this batch was given out, so its examples are of "
                "another batch; run model(x) on the batch of this step"
            )
        if not self.part:
            return
        self.check_open()
        if has_views and examples != self._drawn:
            raise BatchReuseError(
                f"the views of {examples} examples came through one backward pass, of a batch of "
                f"{self._drawn} examples: run the model once on all views of all its examples, "
                "those of an example side by side; max_physical_batch splits large batches"
            )
        if self._used + examples > self._drawn:
            raise BatchReuseError(
                f"{self._used + examples} examples came through backward passes, of a batch of "
                f"{self._drawn}, which is charged for one clipped gradient of each. For K views of "
                "each example make the engine with augmentation_multiplicity=K; where an example "
                "is a sequence, give the model (examples, tokens, ...) and flatten inside it"
            )
        self._used += examples

    def check_open(self) -> None:
        """Check that the current batch of a training loop is not yet released.

        Raises:
            BatchReuseError: the optimizer already made a step on this batch.
        """
        if self.part and self._current is None:
            raise BatchReuseError(
                "the batch is released already, and a batch that the engine drew is used once: "
                "take the next one from the loop, and call optimizer.step() once for each batch"
            )

    def check_used(self) -> None:
        """Check that all examples of the current physical batch passed through backward passes.

        Raises:
            BatchReuseError: some examples were left out, or one row holds several examples.
        """
        if self.part and self._used != self._drawn:
            raise BatchReuseError(
                f"{self._used} examples came through backward passes, of a batch of {self._drawn}: "
                "run the model and loss.backward() on all of them, one row (or "
                "augmentation_multiplicity=K rows) each, as a row of several examples or a choice "
                "of examples has another sensitivity; to leave examples out, remove them from the "
                "dataset before training"
            )

    def indices(self, batches: Iterable[Batch]) -> Generator[np.ndarray, None, None]:
        """Yield the example indices of each part (physical batch) of each batch in turn.

        Args:
            batches: the batches to yield.

        Raises:
            SkippedBatchError: the loop continued without a step on the batch.
            BatchReuseError: the loop continued without a backward pass on all examples of a part.
            EpochError: another loop has taken a batch in the meantime.
        """
        for batch in batches:
            step, parts = self.schedule.steps, self.split(batch)
            self._drop()  # parts from an abandoned loop must not join this batch
            self._current, given = batch, 0
            try:
                for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                    given = self._parts_given = self._parts_given + 1
                    self.part, self.parts_left = given, left
                    self._drawn, self._used, self._is_looping = len(part), 0, True
                    yield part
                    if left and self.part != given:
                        raise EpochError(
                            "another loop has taken a batch; use one loop over engine.batches or a "
                            "private loader at a time"
                        )
                    if left:
                        self.check_used()
            finally:
                self._end_batch(batch, given)
            if self.schedule.steps != step + 1:
                raise SkippedBatchError(
                    f"the batch of step {step} was followed by {self.schedule.steps - step} calls "
                    "of optimizer.step() instead of one. A batch that is skipped, even an empty "
                    "one, reveals who is in it: call optimizer.step() once for each batch"
                )

    def split(self, batch: Batch) -> list[np.ndarray]:
        """Return the example indices of each physical batch; one empty array for an empty batch."""
        whole = batch.indices
        most = max(1, len(whole)) if self.most is None else self.most
        return [whole[start : start + most] for start in range(0, max(1, len(whole)), most)]

    def _end_batch(self, batch: Batch, given: int) -> None:
        """End a batch that its loop has left; one that was yielded whole may still be released."""
        if self.part != given:  # another loop has begun
            return
        self._is_looping = False
        if self._current is not batch:
            self.part = 0
        elif self.parts_left:
            self.part, self.parts_left, self._current = 0, 0, None
            self._drop()


def tensor_batches(
    feed: BatchFeed, tensors: Sequence[Tensor], steps: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of some steps, each a tuple with rows of each tensor.

    Args:
        feed: source that draws and checks the batches of the engine.
        tensors: features, targets and so on, each with the n examples as rows (n, ...).
        steps: number of batches.
    """
    with closing(feed.indices(feed.schedule.draw_batches(len(tensors[0]), steps))) as parts:
        for part in parts:
            index = torch.from_numpy(part)
            yield tuple(tensor[index.to(tensor.device)] for tensor in tensors)


class PrivateLoader:
    """Data loader whose batches are sampled from the dataset in the way that the engine charges.

    One iteration has ⌈examples / expected batch size⌉ batches. Batches have the same structure as
    those of the original loader; an empty batch has no rows.

    Attributes:
        dataset: the dataset of the original loader.
        privacy_engine: the engine that draws the batches.

    Args:
        loader: the original loader, whose dataset, collate function and workers are used.
        feed: source that draws and checks the batches of the engine.
        batches: number of batches in an iteration.
        owner: the engine.
    """

    def __init__(
        self, loader: DataLoader[Any], feed: BatchFeed, batches: int, owner: object
    ) -> None:
        self.dataset: Any = loader.dataset
        self.privacy_engine = owner
        self._loader, self._feed, self._batches = loader, feed, batches
        # An empty batch has the structure and shapes of a full one; no value is used.
        example = loader.collate_fn([loader.dataset[0]])
        empty = map_tensors(example, lambda tensor: tensor[:0] if tensor.ndim else tensor)
        self._collate = partial(_collate, loader.collate_fn, empty)

    def __len__(self) -> int:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a private loader has no {name!r}, as the engine draws its batches; with the "
            "BatchMemoryManager of Opacus, write `from fedsim.clients import BatchMemoryManager`"
        )

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        in_memory = type(self.dataset) is TensorDataset and not loader.num_workers
        if in_memory and loader.collate_fn is default_collate and not loader.pin_memory:
            for rows in tensor_batches(self._feed, self.dataset.tensors, self._batches):
                yield list(rows)
            return
        # Workers fetch ahead, so the batches of the iteration are drawn before it starts.
        drawn = list(self._feed.schedule.draw_batches(len(self.dataset), self._batches))
        parts = [part.tolist() for one_batch in drawn for part in self._feed.split(one_batch)]
        fetching: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=parts,
            collate_fn=self._collate,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),  # not torch's global one
        )
        with closing(self._feed.indices(drawn)) as indices:
            for _, batch in zip(indices, fetching, strict=False):
                yield batch


def loader_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return the batch size and the number of examples of a data loader.

    A loader is refused if it chooses its examples or batches in a special way, which would be lost
    when the engine samples the batches.

    Raises:
        ValueError: the loader has no length, has a batch sampler, or samples with weights.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            "data_loader must have a dataset with a length: batches are drawn from all examples; "
            "an IterableDataset cannot be sampled"
        )
    if loader.batch_size is None:
        raise ValueError(
            "data_loader must have a batch_size and no batch_sampler: the engine draws the "
            "batches, as ε is computed for this sampling"
        )
    plain = isinstance(loader.sampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
    )
    if not plain:
        raise ValueError(
            f"data_loader has a {type(loader.sampler).__name__}, whose choice of examples has no "
            "privacy accounting here and would be replaced; use shuffle=True or no sampler, and "
            "restrict the dataset (torch.utils.data.Subset) if need be"
        )
    if not len(dataset):
        raise ValueError("data_loader must have examples, got an empty dataset")
    return min(loader.batch_size, len(dataset)), len(dataset)


def _collate(collate: Callable[..., Any], empty: Any, examples: list[Any]) -> Any:
    """Return the batch of some examples, and `empty` for none."""
    return collate(examples) if examples else empty
