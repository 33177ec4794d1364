"""Streams of randomness keyed by (seed, client, round, purpose).

Every random number of an experiment comes from a stream made here, never from a global generator
and never in order of arrival, so a result does not depend on scheduling, workers or engine.
Distinct keys give statistically independent streams (numpy's `SeedSequence` spawn keys).

These streams are reproducible by anyone who knows the seed. That is what a simulation needs; it
also means that the noise protects nobody from an adversary who knows the seed.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from fedsim.core.seeding import SeedWords, seed_words

_WORD = 2**32 - 1
_MANY = 64  # keys: fewer are seeded faster one by one
_SEED = 4  # 64-bit words that seed a generator


class Purpose(IntEnum):
    """What a stream is used for. Values are part of reproducibility: never renumber."""

    SPLIT = 1
    PARTITION = 2
    MODEL = 3
    PARTICIPATION = 4
    SAMPLING = 5
    NOISE = 6
    DROPOUT = 7
    DATASET = 8
    EPOCH = 9  # keyed by the number of the epoch in place of the round
    SHARES = 10  # which clients belong to a group that is given as a share of all
    FAULT = 11
    HELD_OUT = 12  # which of its examples a client never trains on
    EVALUATION = 13  # who evaluates
    CANARIES = 14  # which examples carry a canary in an audit
    ROUNDING = 20  # stochastic rounding of secure aggregation


def seed_sequence(
    seed: int, purpose: Purpose, *, client: int = 0, round_number: int = 0
) -> np.random.SeedSequence:
    """Return the root of one keyed stream.

    Args:
        seed: the experiment's seed, 0 ≤ seed < 2^64.
        purpose: what the stream is for.
        client: the client's partition number, 0 ≤ client < 2^32 (0 for the server's streams).
        round_number: the round, 0 ≤ round_number < 2^32 (0 for what happens before round 1).

    Raises:
        ValueError: for a number outside its range; larger ones would alias other keys.
    """
    words = _words(seed, purpose, client, round_number)
    return np.random.SeedSequence(np.array(words, dtype=np.uint32))


def stream(
    seed: int, purpose: Purpose, *, client: int = 0, round_number: int = 0
) -> np.random.Generator:
    """Return the generator of one keyed stream (see `seed_sequence`)."""
    return np.random.Generator(
        np.random.PCG64DXSM(seed_sequence(seed, purpose, client=client, round_number=round_number))
    )


def streams(purpose: Purpose, keys: Sequence[tuple[int, int, int]]) -> list[np.random.Generator]:
    """Return `stream(...)` of many keys (seed, client, round), in a third of the time.

    Raises:
        ValueError: as `seed_sequence`.
    """
    if len(keys) < _MANY:
        return [stream(seed, purpose, client=k, round_number=r) for seed, k, r in keys]
    entropy = [_words(seed, purpose, client, number) for seed, client, number in keys]
    seeds = seed_words(np.array(entropy, dtype=np.uint32), _SEED)
    return [np.random.Generator(_bits(SeedWords(words))) for words in seeds]


def _bits(seed: Any) -> np.random.PCG64DXSM:
    """Return what comes of any ISeedSequence, which numpy takes and its types leave out."""
    return np.random.PCG64DXSM(seed)


def _words(seed: int, purpose: Purpose, client: int, round_number: int) -> tuple[int, ...]:
    """Return what numpy makes of SeedSequence(seed, spawn_key=(purpose, client, round)).

    That is the seed as two words, zeros up to the size of its pool, and a word for each part of the
    key; given so, it takes half the time.
    """
    limits = (("seed", seed, 64), ("client", client, 32), ("round", round_number, 32))
    for name, value, bits in limits:
        if not 0 <= value < 2**bits:
            raise ValueError(f"{name} must be in [0, 2^{bits}), got {value}")
    return (seed & _WORD, seed >> 32, 0, 0, purpose, client, round_number)
