"""Settings of `privacy.noise_correlation` for whole clients in central trust.

This module imports neither torch nor numpy.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.settings import Settings

_Numbers = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=5)]


class PlainCorrelationSettings(Settings):
    """Settings of correlated noise that follows from the number of rounds alone."""

    name: Literal["identity", "tree"] = Field(description="the kind of correlation")


class BltSettings(Settings):
    """Settings of buffered linear Toeplitz noise (BLT), for rounds of whole clients."""

    name: Literal["blt"] = Field(description="the kind of correlation")
    buffers: int = Field(
        default=3,
        ge=2,
        le=5,
        description="number of arrays, each as large as the model, that the server keeps",
    )
    scales: _Numbers | None = Field(
        default=None,
        description="scale of each buffer, together at most 1; null: the best for rounds and "
        "rounds_apart, which the run records",
    )
    decays: _Numbers | None = Field(
        default=None, description="decay of each buffer in a round; given with scales"
    )

    @model_validator(mode="after")
    def _both(self) -> Self:
        lengths = {len(numbers or ()) for numbers in (self.scales, self.decays)}
        if lengths not in ({0}, {self.buffers}):
            raise ValueError(
                f"scales and decays have one number for each of the {self.buffers} buffers; give "
                "both, or leave both out"
            )
        if sum(self.scales or ()) > 1.0:
            raise ValueError(f"scales must add up to at most 1, got {sum(self.scales or ()):g}")
        return self
