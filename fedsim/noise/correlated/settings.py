"""Settings of `privacy.noise_correlation`: the kinds of correlation, for steps and for rounds.

This module imports neither torch nor numpy.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.core.settings import Choice, Settings

OF_STEPS = ("toeplitz",)
"""Kinds of noise correlation between the steps of a client, for privacy of examples."""

OF_ROUNDS: Mapping[str, str] = MappingProxyType(
    {
        "identity": "independent noise, charged for the whole run",
        "tree": "the binary tree with Honaker's estimator",
        "toeplitz": "a banded Toeplitz matrix",
        "blt": "a buffered linear Toeplitz matrix",
    }
)
"""Descriptions of the kinds of noise correlation between rounds, for privacy of clients."""

DESCRIPTION = (
    "correlation of noise from step to step, which lowers the error of sums over many steps; none: "
    "independent noise; toeplitz: for steps of a client's examples; toeplitz, blt, tree or "
    "identity: from round to round, for unit: client in trust: central"
)
"""Description of the key `privacy.noise_correlation`."""

_Numbers = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=5)]


class ToeplitzSettings(Settings):
    """Settings of correlated noise: the banded Toeplitz square root of the prefix-sum matrix."""

    name: Literal["toeplitz"] = Field(description="the kind of correlation")
    bands: int = Field(
        ge=2,
        le=MAX_NOISE_BANDS,
        description="number of steps, including the first, over which the noise of a step is "
        "partly cancelled; two uses of an example are at least as many steps apart",
    )


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


CorrelationSettings = ToeplitzSettings | PlainCorrelationSettings | BltSettings
NoiseCorrelationSettings = Literal["none"] | Annotated[CorrelationSettings, Choice()]
