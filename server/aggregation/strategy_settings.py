"""Names and settings of the strategies, without numpy.

The strategies themselves are in `strategies.py` and `server_optimizers.py`. A new one needs an
entry here, a class there, and its line in `strategy_registry.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field

from fedsim.core.settings import Settings


class NoSettings(Settings):
    """Settings of a strategy that has none."""


class FedAvgMSettings(Settings):
    """`federation.strategy` of `fedavgm`."""

    lr: float = Field(default=1.0, gt=0, description="server learning rate η")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum factor β")


class FedAdagradSettings(Settings):
    """`federation.strategy` of `fedadagrad`."""

    lr: float = Field(default=0.1, gt=0, description="server learning rate η")
    beta_1: float = Field(default=0.0, ge=0, lt=1, description="decay of the first moment")
    tau: float = Field(default=1e-3, gt=0, description="adaptivity τ: the least denominator")


class FedAdamSettings(Settings):
    """`federation.strategy` of `fedadam` and `fedyogi`."""

    lr: float = Field(default=0.1, gt=0, description="server learning rate η")
    beta_1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta_2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment")
    tau: float = Field(default=1e-3, gt=0, description="adaptivity τ: the least denominator")


@dataclass(frozen=True)
class StrategyEntry:
    """A built-in strategy: its line in `fedsim list` and the class of its settings."""

    description: str
    settings: type[Settings]


STRATEGIES: Mapping[str, StrategyEntry] = {
    "fedavg": StrategyEntry(
        "federated averaging (McMahan et al. 2017), summed in a fixed order", NoSettings
    ),
    "fedavgm": StrategyEntry(
        "FedAvg with momentum at the server (Hsu et al. 2019)", FedAvgMSettings
    ),
    "fedadagrad": StrategyEntry("Adagrad at the server (Reddi et al. 2021)", FedAdagradSettings),
    "fedadam": StrategyEntry("Adam at the server (Reddi et al. 2021)", FedAdamSettings),
    "fedyogi": StrategyEntry("Yogi at the server (Reddi et al. 2021)", FedAdamSettings),
}


class StrategySettings(Settings):
    """`federation.strategy` as a mapping: a name, and the settings of that strategy."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        description="a built-in name, package.module:Class, or ./file.py:Class; the other keys "
        "are the settings of the strategy"
    )

    @property
    def options(self) -> dict[str, Any]:
        """The settings of the strategy: every key but `name`."""
        return dict(self.model_extra or {})
