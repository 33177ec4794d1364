"""Trimmed mean: the mean over clients without the largest and the smallest values."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, Update
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from fedsim.algorithms.state import ServerState


class TrimmedMeanOptions(Settings):
    """Settings of the algorithm `trimmed_mean` below `federation.strategy`."""

    trimmed_share: float = Field(
        default=0.2,
        ge=0,
        lt=0.5,
        description="share of the models that is left out at each end, value by value",
    )


class TrimmedMean(Algorithm):
    """Mean of each value over the clients, without a share of the largest and smallest values.

    At each end, ⌊β n⌋ of n values are left out, with β the option `trimmed_share`.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", Algorithm 1, option II.
    """

    name: ClassVar[str] = "trimmed_mean"
    description: ClassVar[str] = "mean without the extreme values (Yin et al. 2018)"
    Options: ClassVar[type[Settings]] = TrimmedMeanOptions
    takes_weights: ClassVar[bool] = False
    uses_each_update: ClassVar[bool] = True
    options: Any

    def left_out(self, n: int) -> int:
        """Return the number of values, of n, that are left out at each end."""
        return int(self.options.trimmed_share * n)

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with trimmed means of trained parameters, and means of other arrays."""
        model, n = dict(update.mean), len(update.contributions)
        left_out = self.left_out(n)
        for name, _ in self.trained(state):
            ordered = update.models[name].astype("float64")
            ordered.sort(axis=0)
            model[name] = ordered[left_out : n - left_out].mean(0)
        return state.with_model(model)
