"""Strategies: how the mean of the client models becomes the next global model.

`server_optimizers.py` has strategies with moments, `strategy_registry.py` finds one by its name. A
strategy of your own is a class that derives from `Strategy`; an experiment names it as
`./file.py:Class` in `federation.strategy`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord

from fedsim.core.settings import Settings
from fedsim.server.aggregation.aggregator import Aggregator, PlainAggregator
from fedsim.server.aggregation.strategy_settings import NoSettings
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.settings import FederationSettings
from fedsim.server.state import ServerState


class Strategy(ABC):
    """Server side of a federated algorithm.

    Args:
        settings: `federation:` of the experiment.
        parameters: names of the model's trained parameters; other arrays are buffers or frozen.

    Attributes:
        Options: class of the strategy's own settings, the keys beside `name` of
            `federation.strategy`.
        takes_weights: whether the strategy weighs clients; where not, `federation.weighting` is
            ignored, with a notice.
        options: the strategy's own settings.

    Raises:
        ValidationError: the settings are not those of `Options`.
    """

    Options: ClassVar[type[Settings]] = NoSettings
    takes_weights: ClassVar[bool] = True
    options: Any

    def __init__(self, settings: FederationSettings, *, parameters: Collection[str] = ()) -> None:
        self.settings = settings
        self.parameters = frozenset(parameters)
        self.options = self.Options.model_validate(settings.strategy_settings.options)

    def aggregator(self, weights: ClientWeights) -> Aggregator[Any]:
        """Return the aggregator of plain updates; secure aggregation replaces it.

        Args:
            weights: the weights of all clients; equal where the strategy takes none.
        """
        return PlainAggregator(weights)

    @abstractmethod
    def update(
        self, state: ServerState, aggregate: ArrayRecord
    ) -> tuple[ArrayRecord, Mapping[str, np.ndarray]]:
        """Return the next global model and the next state of the server's optimizer.

        Args:
            state: the state before the round, with the model that the clients started from.
            aggregate: the aggregate of the client models, with the names and shapes of the model.
        """


class FedAvg(Strategy):
    """Federated averaging: the next global model is the weighted mean of the client models.

    Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", Algorithm 1.
    """

    def update(
        self, state: ServerState, aggregate: ArrayRecord
    ) -> tuple[ArrayRecord, Mapping[str, np.ndarray]]:
        """Return the mean as it is; FedAvg keeps no optimizer state."""
        return aggregate, state.optimizer
