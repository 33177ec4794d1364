"""Streams of randomness keyed by (seed, client, round, purpose).

Every random number of an experiment comes from a stream of this module, never from a global
generator and never in order of arrival. So a result does not depend on scheduling, workers or
engine. Distinct keys give statistically independent streams (numpy's `SeedSequence` spawn keys).

Everyone who knows the seed can reproduce these streams, as a simulation needs. Against an adversary
who knows the seed, such noise protects nobody.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from fedsim.core.seeding import SeedWords, seed_words

_UINT32_MAX = 2**32 - 1
_MIN_BATCH_KEYS = 64  # fewer keys are seeded faster one by one
_SEED_WORDS = 4  # 64-bit words of a generator's seed


class Purpose(IntEnum):
    """The use of a stream. Values are part of reproducibility: never renumber them."""

    SPLIT = 1
    PARTITION = 2
    MODEL = 3
    PARTICIPATION = 4
    SAMPLING = 5
    NOISE = 6
    DROPOUT = 7
    DATASET = 8
    EPOCH = 9  # keyed by the number of the epoch in place of the round
    SHARES = 10  # clients of a group that is defined as a share of all clients
    FAULT = 11
    HELD_OUT = 12  # examples of a client that are held out of training
    EVALUATION = 13  # clients that evaluate
    CANARIES = 14  # examples that carry a canary in an audit
    ROUNDING = 20  # stochastic rounding of secure aggregation


def seed_sequence(
    seed: int, purpose: Purpose, *, client: int = 0, round_number: int = 0
) -> np.random.SeedSequence:
    """Return the root of one keyed stream.

    Args:
        seed: the experiment's seed, 0 ≤ seed < 2^64.
        purpose: the use of the stream.
        client: the client's partition number, 0 ≤ client < 2^32 (0 for the server's streams).
        round_number: the round, 0 ≤ round_number < 2^32 (0 before round 1).

    Raises:
        ValueError: a number outside its range, which would alias another key.
    """
    words = _entropy_words(seed, purpose, client, round_number)
    return np.random.SeedSequence(np.array(words, dtype=np.uint32))


def stream(
    seed: int, purpose: Purpose, *, client: int = 0, round_number: int = 0
) -> np.random.Generator:
    """Return the generator of one keyed stream.

    Args:
        seed: as `seed_sequence`.
        purpose: as `seed_sequence`.
        client: as `seed_sequence`.
        round_number: as `seed_sequence`.

    Raises:
        ValueError: as `seed_sequence`.
    """
    return np.random.Generator(
        np.random.PCG64DXSM(seed_sequence(seed, purpose, client=client, round_number=round_number))
    )


def streams(purpose: Purpose, keys: Sequence[tuple[int, int, int]]) -> list[np.random.Generator]:
    """Return `stream(...)` of many keys, in a third of the time.

    Args:
        purpose: the use of all streams.
        keys: (seed, client, round) of each stream.

    Raises:
        ValueError: as `seed_sequence`.
    """
    if len(keys) < _MIN_BATCH_KEYS:
        return [stream(seed, purpose, client=k, round_number=r) for seed, k, r in keys]
    entropy = [_entropy_words(seed, purpose, client, number) for seed, client, number in keys]
    seeds = seed_words(np.array(entropy, dtype=np.uint32), _SEED_WORDS)
    return [np.random.Generator(_bit_generator(SeedWords(words))) for words in seeds]


def _bit_generator(seed: Any) -> np.random.PCG64DXSM:
    """Return the generator's bits; numpy accepts any ISeedSequence, but its types do not."""
    return np.random.PCG64DXSM(seed)


def _entropy_words(seed: int, purpose: Purpose, client: int, round_number: int) -> tuple[int, ...]:
    """Return the entropy words of SeedSequence(seed, spawn_key=(purpose, client, round)).

    They are the seed as two words, zeros up to the size of numpy's pool, and one word for each part
    of the key. Passing them directly halves numpy's time.
    """
    limits = (("seed", seed, 64), ("client", client, 32), ("round", round_number, 32))
    for name, value, bits in limits:
        if not 0 <= value < 2**bits:
            raise ValueError(f"{name} must be in [0, 2^{bits}), got {value}")
    return (seed & _UINT32_MAX, seed >> 32, 0, 0, purpose, client, round_number)
