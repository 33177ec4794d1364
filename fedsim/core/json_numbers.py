"""Numbers in JSON, which has no infinity and no NaN."""

import math


def finite_or_none(value: float) -> float | None:
    """Return the value, or None (JSON's null) where it is infinite or NaN."""
    return value if math.isfinite(value) else None
