"""Krum and multi-Krum: the mean of the client models that are nearest to other models."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedsim.algorithms.algorithm import Algorithm, Update
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from fedsim.algorithms.state import ServerState


class KrumOptions(Settings):
    """Settings of the algorithm `krum` below `federation.strategy`."""

    malicious_clients: int = Field(
        default=0, ge=0, description="f, number of malicious clients in a round"
    )
    kept_models: int = Field(
        default=1,
        ge=1,
        description="m, number of models that are averaged; 1: Krum, more: multi-Krum",
    )


class Krum(Algorithm):
    """Mean of the m client models that are nearest to their neighbours (m = 1: Krum).

    With n models of which f may be malicious, the neighbours of a model are the n − f − 2 nearest
    others, at least one. The m models with the smallest sums of squared distances to their
    neighbours are chosen. Ties go to the smaller client number.

    Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", section 4.
    """

    name: ClassVar[str] = "krum"
    description: ClassVar[str] = "the models nearest to others (Blanchard et al. 2017)"
    Options: ClassVar[type[Settings]] = KrumOptions
    takes_weights: ClassVar[bool] = False
    uses_each_update: ClassVar[bool] = True
    options: KrumOptions

    @property
    def least_clients(self) -> int:
        """Smallest number of clients in a round: 2 f + 3 for f malicious clients.

        The paper needs 2 f + 2 < n for n clients. If f is 0, the value is 1.
        """
        f = self.options.malicious_clients
        return 2 * f + 3 if f else 1

    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the mean of the chosen models, including their buffers."""
        chosen = self.chosen(state, update)
        model = {
            name: value[chosen].astype("float64").mean(0) for name, value in update.models.items()
        }
        return state.with_model({**update.mean, **model})

    def chosen(self, state: "ServerState", update: Update) -> list[int]:
        """Return the indices of the chosen models in `update.models`, smallest distance sum first.

        Args:
            state: the server state before the round.
            update: the aggregated uploads of the round.
        """
        n = len(update.contributions)
        neighbours = max(1, n - self.options.malicious_clients - 2)
        moves = [
            (update.models[name].astype("float64") - x).reshape(n, -1)
            for name, x in self.trained(state)
        ]

        def score(k: int) -> float:
            squares = [((move - move[k]) ** 2).sum(1) for move in moves]
            others = sorted(sum(float(square[j]) for square in squares) for j in range(n) if j != k)
            return sum(others[:neighbours])

        return sorted(range(n), key=lambda k: (score(k), k))[: self.options.kept_models]
