"""The base class of all settings."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedsim.core.limits import MIN_PROBABILITY


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, no silent conversions, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _refuse_tiny(value: float) -> float:
    if value < MIN_PROBABILITY:
        raise ValueError(f"must be >= {MIN_PROBABILITY:g}, got {value:g}")
    return value


Probability = Annotated[float, Field(gt=0, lt=1), AfterValidator(_refuse_tiny)]
"""A number between 0 and 1, both excluded, that float64 holds with all its digits."""

Share = Annotated[float, Field(gt=0, le=1), AfterValidator(_refuse_tiny)]
"""A number above 0 and at most 1, likewise."""
