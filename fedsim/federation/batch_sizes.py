"""`local.batch_size` of private clients against their declared sizes, before any computation.

Without privacy a batch is at most the client's data, whatever the file says.
"""

from collections.abc import Sequence

from fedsim.data import DataError
from fedsim.experiment import Experiment


def check_batch_size(experiment: Experiment, sizes: Sequence[int]) -> None:
    """Check that some client is as large as an expected lot.

    Args:
        experiment: the settings.
        sizes: number of examples of each client.

    Raises:
        DataError: `batch_size` is above the declared size of every client.
    """
    batch, declared = experiment.local.batch_size, _declared_sizes(experiment, sizes)
    if declared and batch > max(declared):
        largest = max(declared)
        raise DataError(
            f"local.batch_size: {batch:,} is above the size of every client, at most {largest:,}; "
            f"set local.batch_size={largest} for lots of all examples, or a smaller number"
        )


def full_batch_note(experiment: Experiment, sizes: Sequence[int]) -> str | None:
    """Return a line about the clients that are smaller than an expected lot; None without one.

    Args:
        experiment: the settings.
        sizes: number of examples of each client.
    """
    batch = experiment.local.batch_size
    small = [size for size in _declared_sizes(experiment, sizes) if 0 < size < batch]
    if not small:
        return None
    return (
        f"local.batch_size = {batch:,} is above the size of {len(small):,} of {len(sizes):,} "
        f"clients (the smallest has {min(small):,} examples): their sampling rate is 1, which "
        "gives no amplification"
    )


def _declared_sizes(experiment: Experiment, sizes: Sequence[int]) -> Sequence[int]:
    """Return the public sizes that set sampling rates; none where `batch_size` sets no rate."""
    privacy = experiment.privacy
    if privacy is None or privacy.sampling_rate is not None:
        return ()
    declared = privacy.declared_examples
    return sizes if declared is None else [declared] * len(sizes)
