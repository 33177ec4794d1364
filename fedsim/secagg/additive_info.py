"""`info` bytes (HPKE, HKDF) of the shares, seeds and sums of additive secret sharing."""

from fedsim.secagg.context import RoundContext

SHARE_PURPOSE = "leader share"
SEED_PURPOSE = "helper seed"
TOTAL_PURPOSE = "helper total"


def leader_share_info(context: RoundContext, client: int) -> bytes:
    """Return the `info` of the leader's share.

    Args:
        context: context of the round.
        client: number of the client that sends it.
    """
    return context.info(purpose=SHARE_PURPOSE, sender=client, receiver=0)


def seed_info(context: RoundContext, client: int, helper: int) -> bytes:
    """Return the `info` of a sealed seed.

    Args:
        context: context of the round.
        client: number of the client that sends it.
        helper: number of the helper that opens it.
    """
    return context.info(purpose=SEED_PURPOSE, sender=client, receiver=helper)


def total_info(context: RoundContext, helper: int) -> bytes:
    """Return the `info` of a helper's sum of shares.

    Args:
        context: context of the round.
        helper: number of the helper that sends it.
    """
    return context.info(purpose=TOTAL_PURPOSE, sender=helper, receiver=0)
