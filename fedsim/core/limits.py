"""Largest and smallest allowed values of settings; a value beyond them counts as a mistake.

Such a value is refused when the experiment file is read. If the limit depends on the data, the
value is refused before memory or time is spent on it.
"""

import os

MAX_FILE_BYTES = 4 << 20
"""Most bytes of an experiment file; a file of this size is parsed in seconds."""

MAX_REPORTED = 50
"""Most mistakes of one file that are explained; the others are only counted."""

MAX_ROUNDS = 200_000
"""Most rounds of a federation; the clients of all rounds are drawn in seconds.

With `MAX_STEPS`, the steps of a client stay below the 10^12 that accountants allow.
"""

MAX_STEPS = 1_000_000
"""Most optimizer steps of one client in one round."""

MAX_CLIENTS = 1_000_000
"""Most clients of a federation; each needs a few kB of memory and a ledger record per round."""

MAX_LEDGER_RECORDS = 100_000_000
"""Most records of a run's ledger, rounds times clients per round: about 40 GB on disk."""

MAX_RENYI_ORDER = 65536.0
"""Largest Rényi order; the binomial sum at a whole order has that many terms."""

MAX_EXAMPLES = 1_000_000_000
"""Most examples of a batch or a client, also of a declared client size."""

MAX_CLASSES = 1_000_000
"""Most classes of a dataset; a classifier has a score and a row of weights for each class."""

MAX_LAYERS = 100
"""Most hidden layers of a built-in model."""

MAX_WIDTH = 1_000_000
"""Largest width of a layer of a built-in model."""

MAX_PARAMETERS = 200_000_000
"""Most trained values of a built-in model: 800 MB in float32, in several copies per step."""

MAX_WORKERS = 4096
"""Most worker processes of an engine."""

MAX_SECONDS = 10.0 * 365 * 24 * 3600
"""Longest deadline, delay or timeout in seconds: ten years."""

MAX_NUMBER = 1e18
"""Largest size of any other number in a file; the product of two is finite in float32."""

MIN_PROBABILITY = 1e-300
"""Smallest δ, rate or fraction; below it float64 loses digits, and 1 / δ overflows."""

MAX_NOISE_BANDS = 128
"""Most bands of correlated noise; a client keeps the noise of that many steps in memory."""

MAX_MATCHED_FILES = 1_000_000
"""Most file names in the directories that a file pattern reads; they are listed in seconds."""

MAX_COMPARED_RUNS = 10_000
"""Most runs of one comparison, variants times seeds."""

MAX_AUDITED_STEPS = 10_000_000
"""Most steps of an audited client; each is a forward and a backward pass."""

_MEMORY_BYTES_IF_UNKNOWN = 64 << 30


def machine_bytes() -> int:
    """Return the memory of this machine in bytes; 64 GiB if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return _MEMORY_BYTES_IF_UNKNOWN
