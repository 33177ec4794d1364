"""FedMedian: the median of the clients' models, value by value."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.algorithm import Algorithm, Update

if TYPE_CHECKING:
    from fedsim.algorithms.state import ServerState


class FedMedian(Algorithm):
    """Aggregation by the median: each value of the next model is the median over the clients.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", Algorithm 1, option I.
    """

    name: ClassVar[str] = "fedmedian"
    description: ClassVar[str] = "median of the models, value by value (Yin et al. 2018)"
    takes_weights: ClassVar[bool] = False
    uses_each_update: ClassVar[bool] = True

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the medians of trained parameters and the means of other arrays."""
        model, n = dict(update.mean), len(update.contributions)
        for name, _ in self.trained(state):
            ordered = update.models[name].astype("float64")
            ordered.sort(axis=0)
            model[name] = ordered[(n - 1) // 2 : n // 2 + 1].mean(0)
        return state.with_model(model)
