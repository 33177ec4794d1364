"""The bytes that name each secret of additive sharing: bound into its envelope."""

from fedsim.secagg.context import RoundContext

SHARE_PURPOSE = "leader share"
SEED_PURPOSE = "helper seed"
TOTAL_PURPOSE = "helper total"


def share_info(context: RoundContext, client: int) -> bytes:
    """Return the bytes that name the leader's share of `client`."""
    return context.info(purpose=SHARE_PURPOSE, sender=client, receiver=0)


def seed_info(context: RoundContext, client: int, helper: int) -> bytes:
    """Return the bytes that name the seed of `client` for `helper`."""
    return context.info(purpose=SEED_PURPOSE, sender=client, receiver=helper)


def total_info(context: RoundContext, helper: int) -> bytes:
    """Return the bytes that name the sum of `helper`."""
    return context.info(purpose=TOTAL_PURPOSE, sender=helper, receiver=0)
