"""`local.batch_size` of private clients against their declared sizes, before any computation.

Without privacy a batch is at most the client's data, whatever the file says.
"""

from collections.abc import Sequence
from statistics import median_high

from fedsim.data import DataError
from fedsim.experiment import Experiment

_MAX_RATE_RATIO = 3.0  # of the largest sampling rate to the median, without a note


def check_batch_size(experiment: Experiment, sizes: Sequence[int]) -> None:
    """Check that some client is as large as an expected lot.

    Args:
        experiment: the settings.
        sizes: number of examples of each client.

    Raises:
        DataError: `batch_size` is above the declared size of every client.
    """
    batch, declared = experiment.local.batch_size, _declared_sizes(experiment, sizes)
    if batch != "full" and declared and batch > max(declared):
        largest = max(declared)
        raise DataError(
            f"local.batch_size: {batch:,} is above the size of every client, at most {largest:,}; "
            "set local.batch_size=full for lots of all examples, or a smaller number"
        )


def full_batch_note(experiment: Experiment, sizes: Sequence[int]) -> str | None:
    """Return a line about small clients with a far larger sampling rate; None without one.

    A fixed lot gives a small client the largest rate, and so the most noise.

    Args:
        experiment: the settings.
        sizes: number of examples of each client.
    """
    batch = experiment.local.batch_size
    declared = [size for size in _declared_sizes(experiment, sizes) if size > 0]
    if batch == "full" or not declared:
        return None
    rates = [min(1.0, batch / size) for size in declared]
    usual, largest = median_high(rates), max(rates)
    small = [size for size in declared if size < batch]
    if not small and largest <= _MAX_RATE_RATIO * usual:
        return None
    fix = f"; privacy.sampling.rate={usual:.2g} gives every client the same rate"
    if small:
        return (
            f"local.batch_size = {batch:,} is above the size of {len(small):,} of {len(sizes):,} "
            f"clients (the smallest has {min(small):,} examples): their sampling rate is 1, which "
            f"gives no amplification{'' if usual == 1.0 else fix}"
        )
    return (
        f"local.batch_size = {batch:,} is a sampling rate of {largest:.2g} for the smallest client "
        f"({min(declared):,} examples) and {usual:.2g} for the median client: small clients get "
        f"the most noise{fix}"
    )


def _declared_sizes(experiment: Experiment, sizes: Sequence[int]) -> Sequence[int]:
    """Return the public sizes that set sampling rates; none where `batch_size` sets no rate."""
    privacy = experiment.privacy
    if privacy is None or not privacy.release_kind.draws_lots or privacy.sampling.rate is not None:
        return ()
    declared = privacy.adjacency.declared_examples
    return sizes if declared is None else [declared] * len(sizes)
