"""Additive secret sharing among several aggregators, with shares compressed to seeds.

A vector Y is split into k shares: one for the leader (the server) and k - 1 for helpers. A helper's
share is the keystream of a 32-byte seed s_j, and only the seed is sent. The leader's share is the
rest, Y - Σ PRG(s_j). All k shares add up to Y exactly. Any k - 1 shares are uniform for every Y if
AES-256 (or ChaCha20) is pseudorandom. The module also computes the `info` bytes, by which HPKE and
HKDF bind a share to its round and parties.
"""

from collections.abc import Sequence

from fedsim.secagg.context import RoundContext
from fedsim.secagg.encoding import Ring
from fedsim.secagg.masks import SeedExpander, derive_key, new_seed


def split(vector: Ring, infos: Sequence[bytes], expander: SeedExpander) -> list[bytes]:
    """Replace a vector by the leader's share, in place, and return the helpers' seeds.

    Guarantee: seeds come fresh from the operating system in every call. They are never derived
    from other values.

    Args:
        vector: the vector to share, ring elements (d,); overwritten with the leader's share.
        infos: the `info` bytes of each helper's share; all must be different.
        expander: the keystream generator of the helpers' shares.
    """
    seeds = [new_seed() for _ in infos]
    expander.add_into(vector, _keys(seeds, infos), subtract=True)
    return seeds


def expand_into(
    total: Ring, seeds: Sequence[bytes], infos: Sequence[bytes], expander: SeedExpander
) -> None:
    """Expand seeds to shares and add the shares to a helper's sum, in place.

    Args:
        total: the helper's sum, ring elements (d,).
        seeds: a 32-byte seed for each client.
        infos: the `info` bytes of each share, in the same order.
        expander: the keystream generator of the shares.
    """
    expander.add_into(total, _keys(seeds, infos))


def _keys(seeds: Sequence[bytes], infos: Sequence[bytes]) -> list[bytes]:
    return [derive_key(seed, info) for seed, info in zip(seeds, infos, strict=True)]


def leader_share_info(context: RoundContext, client: int) -> bytes:
    """Return the `info` bytes that bind a client's share for the leader to a round.

    Args:
        context: the context of the round.
        client: the number of the client that sends the share.
    """
    return context.info(purpose="leader share", sender=client, receiver=0)


def seed_info(context: RoundContext, client: int, helper: int) -> bytes:
    """Return the `info` bytes that bind a client's encrypted seed to a round and a helper.

    Args:
        context: the context of the round.
        client: the number of the client that sends the seed.
        helper: the number of the helper that opens the envelope.
    """
    return context.info(purpose="helper seed", sender=client, receiver=helper)


def total_info(context: RoundContext, helper: int) -> bytes:
    """Return the `info` bytes that bind a helper's sum of shares to a round.

    Args:
        context: the context of the round.
        helper: the number of the helper that sends the sum.
    """
    return context.info(purpose="helper total", sender=helper, receiver=0)
