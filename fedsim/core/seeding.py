"""numpy's `SeedSequence`, vectorised over many keys.

One by one, numpy needs more time for a client's two streams than a small client for a training
step. Over a cohort the same arithmetic, on 32-bit words with overflow, is a few hundred operations
on arrays with one number for each client. Tests compare it with numpy, word by word.

Source: O'Neill 2015, "Developing a seed_seq alternative", as implemented in numpy, which guarantees
that it does not change. Names of constants are those of numpy.
"""

from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_POOL_WORDS = 4  # words
_XSHIFT = np.uint32(16)
_UINT32_MAX = 2**32 - 1
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_MULT_L, _MIX_MULT_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)


class SeedWords(ISeedSequence):
    """Precomputed seed words of one generator.

    Args:
        words: the words, (count,), of the type that the generator requests.
    """

    def __init__(self, words: np.ndarray) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the words.

        Args:
            n_words: number of words.
            dtype: their type.

        Raises:
            ValueError: another number or type of words is requested.
        """
        if n_words != len(self._words) or dtype != self._words.dtype:
            held = f"{len(self._words)} words of {self._words.dtype}"
            raise ValueError(
                f"{n_words} words of {dtype!r} are requested, but these seeds hold {held}"
            )
        return self._words


def seed_words(entropy: np.ndarray, count: int) -> np.ndarray:
    """Return `SeedSequence(row).generate_state(count, uint64)` of each row, uint64 (n, count).

    Args:
        entropy: 32-bit words (n, k), k ≥ 4.
        count: number of 64-bit words of each row.
    """
    pool = _mix_entropy([np.ascontiguousarray(column) for column in entropy.astype(np.uint32).T])
    scramble = _Scramble(_INIT_B, _MULT_B)
    drawn = [scramble(pool[i % _POOL_WORDS]).astype(np.uint64) for i in range(2 * count)]
    pairs = zip(drawn[::2], drawn[1::2], strict=True)
    return np.stack([low | high << np.uint64(32) for low, high in pairs], axis=1)


class _Scramble:
    """A hash of words whose constant changes with each call."""

    def __init__(self, first: int, factor: int) -> None:
        self._constant, self._factor = first, factor

    def __call__(self, words: np.ndarray) -> np.ndarray:
        scrambled = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & _UINT32_MAX
        scrambled *= np.uint32(self._constant)
        scrambled ^= scrambled >> _XSHIFT
        return scrambled


def _mix_entropy(entropy: list[np.ndarray]) -> list[np.ndarray]:
    """Return the entropy pool: every word of entropy is mixed into every word of the pool."""
    scramble = _Scramble(_INIT_A, _MULT_A)
    pool = [scramble(words) for words in entropy[:_POOL_WORDS]]
    for source in range(_POOL_WORDS):
        for place in range(_POOL_WORDS):
            if place != source:
                pool[place] = _mix(pool[place], scramble(pool[source]))
    for words in entropy[_POOL_WORDS:]:
        for place in range(_POOL_WORDS):
            pool[place] = _mix(pool[place], scramble(words))
    return pool


def _mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed = one * _MIX_MULT_L
    mixed -= other * _MIX_MULT_R
    mixed ^= mixed >> _XSHIFT
    return mixed
