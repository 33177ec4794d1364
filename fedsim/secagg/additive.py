"""Additive secret sharing with compressed shares.

Of k shares of a vector Y, k - 1 are keystreams, sent as 32-byte seeds; the leader's is the rest,
Y - Σ PRG(s_j). Any k - 1 shares are uniform, whatever Y is, as far as AES-256 (or ChaCha20) is
pseudorandom; all k add up to Y exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.secagg.encoding import Ring
from fedsim.secagg.prg import SeedExpander, derive_key, new_seed


@dataclass(frozen=True)
class AdditiveSharing:
    """Splits a vector among the leader and its helpers.

    Guarantee: seeds are fresh from the operating system in every call and are never derived.

    Args:
        expander: the keystream behind the shares of helpers.
        draw_seed: where a seed comes from; tests of recorded vectors put their own here.
    """

    expander: SeedExpander
    draw_seed: Callable[[], bytes] = new_seed

    def shard(self, vector: Ring, contexts: Sequence[bytes]) -> list[bytes]:
        """Turn `vector` into the leader's share, in place, and return the helpers' seeds.

        Args:
            vector: the payload; afterwards it is the leader's share.
            contexts: for each helper the bytes that name its share; they must differ.
        """
        seeds = [self.draw_seed() for _ in contexts]
        self.expander.add_into(vector, self._keys(seeds, contexts), subtract=True)
        return seeds

    def expand_into(self, total: Ring, seeds: Sequence[bytes], contexts: Sequence[bytes]) -> None:
        """Add the shares behind `seeds` to a helper's running sum, in place."""
        self.expander.add_into(total, self._keys(seeds, contexts))

    @staticmethod
    def unshard(shares: Sequence[Ring]) -> Ring:
        """Return the sum of all shares."""
        total = shares[0].copy()
        for share in shares[1:]:
            np.add(total, share, out=total)
        return total

    @staticmethod
    def _keys(seeds: Sequence[bytes], contexts: Sequence[bytes]) -> list[bytes]:
        return [derive_key(seed, info) for seed, info in zip(seeds, contexts, strict=True)]
