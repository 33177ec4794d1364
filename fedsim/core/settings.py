"""The base class of all settings."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, no silent conversions, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
