"""Largest and smallest values of settings: beyond them a value is a mistake, not an experiment.

A value that passes costs no more than its experiment needs. One that does not is refused when the
file is read, or, where it depends on the data, before memory or time is spent on it.
"""

import os

MAX_FILE_BYTES = 4 << 20
"""Bytes of an experiment file: far beyond `MAX_VALUES`, and parsed in seconds."""

MAX_REPORTED = 50
"""Mistakes of one file that are explained; the number of the others is named."""

MAX_ROUNDS = 200_000
"""Federated rounds: their participants are drawn in seconds. With `MAX_STEPS` a client's steps stay
within the 10^12 of the accountants."""

MAX_STEPS = 1_000_000
"""Optimizer steps of one client in one round."""

MAX_CLIENTS = 1_000_000
"""Clients of a federation; each is a few kB in memory and a record of the ledger per round."""

MAX_LEDGER_RECORDS = 100_000_000
"""Records of a run's ledger, rounds times clients per round: about 40 GB on disk."""

MAX_RENYI_ORDER = 65536.0
"""Order of Rényi DP: the sum over k of a whole order has as many terms."""

MAX_EXAMPLES = 1_000_000_000
"""Examples of a batch, of a client, or declared."""

MAX_CLASSES = 1_000_000
"""Classes of a dataset: a classifier has a score, and a row of weights, for each."""

MAX_LAYERS = 100
"""Hidden layers of a built-in model."""

MAX_WIDTH = 1_000_000
"""Width of a layer of a built-in model."""

MAX_PARAMETERS = 200_000_000
"""Trained values of a built-in model: 800 MB in float32, of which a step holds several copies."""

MAX_WORKERS = 4096
"""Worker processes of an engine."""

MAX_SECONDS = 10.0 * 365 * 24 * 3600
"""Seconds of a deadline, a delay or a timeout: ten years."""

MAX_NUMBER = 1e18
"""Any other number of a file, up or down: products of two of them are still numbers in float32."""

MIN_PROBABILITY = 1e-300
"""Smallest δ, rate or fraction: below it float64 loses digits, and 1 / δ overflows."""

MAX_NOISE_BANDS = 128
"""Bands of correlated noise: a client keeps the noise of as many steps in memory."""

MAX_MATCHED_FILES = 1_000_000
"""Names in the directories that a pattern of files reads: listed in seconds."""

MAX_COMPARED_RUNS = 10_000
"""Runs of one comparison, variants times seeds."""

MAX_AUDITED_STEPS = 10_000_000
"""Steps of an audited client; each is a forward and a backward pass."""

_MEMORY_BYTES_IF_UNKNOWN = 64 << 30


def machine_bytes() -> int:
    """Return the memory of this machine in bytes, or 64 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return _MEMORY_BYTES_IF_UNKNOWN
