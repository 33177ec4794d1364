"""Public terms of correlated noise: `privacy.noise_correlation`, and the rounds of one client.

The cost of noise that is correlated over rounds depends on the rounds that a client may be in.
This module imports neither torch nor numpy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.core.settings import Settings

SCHEME = "min_separation"
"""Value of `federation.participation.scheme` that keeps the rounds of a client apart."""
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


@dataclass(frozen=True)
class MinSeparation:
    """Bound on the participation of a client: few rounds, far apart.

    Attributes:
        rounds: number of rounds n of the run.
        rounds_apart: smallest difference b between two rounds of one client.
        max_rounds: largest number k of rounds of one client.

    Raises:
        ValueError: a number is below 1, or k rounds that are b apart do not fit into n rounds.

    Example:
        >>> MinSeparation.of(rounds=2000, rounds_apart=100).max_rounds
        20
    """

    rounds: int
    rounds_apart: int
    max_rounds: int

    def __post_init__(self) -> None:
        if min(self.rounds, self.rounds_apart, self.max_rounds) < 1:
            raise ValueError(f"rounds, rounds_apart and max_rounds must be at least 1, got {self}")
        fit = -(-self.rounds // self.rounds_apart)
        if self.max_rounds > fit:
            raise ValueError(
                f"max_rounds must be at most {fit}, as many as fit into {self.rounds} rounds "
                f"{self.rounds_apart} apart, got {self.max_rounds}"
            )

    @classmethod
    def of(cls, rounds: int, rounds_apart: int, max_rounds: int | None = None) -> Self:
        """Return the bound in which a client has as many rounds as fit, at most `max_rounds`.

        Args:
            rounds: number of rounds n.
            rounds_apart: smallest difference b between two rounds of one client.
            max_rounds: upper limit of the number of rounds of one client; None for no other limit.
        """
        fit = -(-rounds // rounds_apart)
        return cls(rounds, rounds_apart, fit if max_rounds is None else min(fit, max_rounds))

    def scaled(self, share: float) -> Self:
        """Return the bound for a run with `share` times as many rounds, in total and of a client.

        Args:
            share: number of rounds of the other run, divided by that of this run, > 0.
        """
        rounds, most = (math.ceil(share * number) for number in (self.rounds, self.max_rounds))
        return type(self).of(rounds, self.rounds_apart, most)

    @property
    def pattern(self) -> range:
        """Rounds of one client, counted from 0, as early and as close together as allowed.

        They are 0, b, ..., (k − 1) b, with b = `rounds_apart` and k = `max_rounds`.
        """
        return range(0, self.max_rounds * self.rounds_apart, self.rounds_apart)


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


class IndependentNoiseSettings(Settings):
    """Settings of noise without correlation."""

    name: Literal["none"] = Field(description="the kind of correlation")


CorrelationSettings = ToeplitzSettings | PlainCorrelationSettings | BltSettings
NoiseCorrelationSettings = IndependentNoiseSettings | CorrelationSettings
