"""Additive secret sharing among several aggregators, with shares compressed to seeds.

A vector Y is split into k shares: one for the leader (the server) and k - 1 for helpers. A helper's
share is the keystream of a 32-byte seed s_j, and only the seed is sent. The leader's share is the
rest, Y - Σ PRG(s_j). All k shares add up to Y exactly. Any k - 1 shares are uniform for every Y if
AES-256 (or ChaCha20) is pseudorandom. The module also computes the `info` bytes, by which HPKE and
HKDF bind a share to its round and parties.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.masks import SeedExpander, derive_key, new_seed


@dataclass(frozen=True)
class AdditiveSharing:
    """Additive secret sharing of a vector among the leader (the server) and its helpers.

    Guarantee: seeds come fresh from the operating system in every call. They are never derived
    from other values.

    Args:
        expander: the keystream generator of the helpers' shares.
        draw_seed: function that returns a new 32-byte seed; tests replace it to reproduce recorded
            vectors.
    """

    expander: SeedExpander
    draw_seed: Callable[[], bytes] = new_seed

    def split(self, vector: Ring, contexts: Sequence[bytes]) -> list[bytes]:
        """Replace a vector by the leader's share, in place, and return the helpers' seeds.

        Args:
            vector: the vector to share, ring elements (d,); overwritten with the leader's share.
            contexts: the `info` bytes of each helper's share; all must be different.
        """
        seeds = [self.draw_seed() for _ in contexts]
        self.expander.add_into(vector, self._keys(seeds, contexts), subtract=True)
        return seeds

    def expand_into(self, total: Ring, seeds: Sequence[bytes], contexts: Sequence[bytes]) -> None:
        """Expand seeds to shares and add the shares to a helper's sum, in place.

        Args:
            total: the helper's sum, ring elements (d,).
            seeds: a 32-byte seed for each client.
            contexts: the `info` bytes of each share, in the same order.
        """
        self.expander.add_into(total, self._keys(seeds, contexts))

    @staticmethod
    def combine(shares: Sequence[Ring]) -> Ring:
        """Return the sum of all shares of a vector, which is the vector itself."""
        total = shares[0].copy()
        for share in shares[1:]:
            np.add(total, share, out=total)
        return total

    @staticmethod
    def _keys(seeds: Sequence[bytes], contexts: Sequence[bytes]) -> list[bytes]:
        return [derive_key(seed, info) for seed, info in zip(seeds, contexts, strict=True)]


SHARE_PURPOSE = "leader share"
SEED_PURPOSE = "helper seed"
TOTAL_PURPOSE = "helper total"


def leader_share_info(context: RoundContext, client: int) -> bytes:
    """Return the `info` bytes that bind a client's share for the leader to a round.

    Args:
        context: the context of the round.
        client: the number of the client that sends the share.
    """
    return context.info(purpose=SHARE_PURPOSE, sender=client, receiver=0)


def seed_info(context: RoundContext, client: int, helper: int) -> bytes:
    """Return the `info` bytes that bind a client's encrypted seed to a round and a helper.

    Args:
        context: the context of the round.
        client: the number of the client that sends the seed.
        helper: the number of the helper that opens the envelope.
    """
    return context.info(purpose=SEED_PURPOSE, sender=client, receiver=helper)


def total_info(context: RoundContext, helper: int) -> bytes:
    """Return the `info` bytes that bind a helper's sum of shares to a round.

    Args:
        context: the context of the round.
        helper: the number of the helper that sends the sum.
    """
    return context.info(purpose=TOTAL_PURPOSE, sender=helper, receiver=0)
