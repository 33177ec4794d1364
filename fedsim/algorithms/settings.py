"""Settings of `federation.strategy`: the name of an algorithm and its settings."""

from typing import Any

from pydantic import ConfigDict, Field

from fedsim.core.settings import Settings


class NoOptions(Settings):
    """The settings of an algorithm that has no settings."""


class AlgorithmSettings(Settings):
    """`federation.strategy` as a mapping: a name, and the settings of that algorithm."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        description="a built-in name, package.module:Class, or ./file.py:Class; the other keys "
        "are the settings of the algorithm"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the algorithm: every key of `federation.strategy` but `name`."""
        return dict(self.model_extra or {})
