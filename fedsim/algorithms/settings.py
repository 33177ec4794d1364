"""Settings of `federation.strategy`: the name of an algorithm and its settings."""

from typing import Any

from pydantic import ConfigDict, Field

from fedsim.core.settings import Settings


class NoOptions(Settings):
    """Empty settings, for an algorithm that has no options."""


class AlgorithmSettings(Settings):
    """Settings `federation.strategy`: the name of an algorithm, and the algorithm's settings."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        description="a built-in name, package.module:Class, or ./file.py:Class; the other keys "
        "are the settings of the algorithm"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the algorithm: every key of `federation.strategy` but `name`."""
        return dict(self.model_extra or {})

    @property
    def momentum(self) -> float:
        """Momentum of the server's optimizer: the option `momentum` if it is in [0, 1), else 0."""
        given = self.options.get("momentum")
        return given if isinstance(given, float) and 0.0 <= given < 1.0 else 0.0
