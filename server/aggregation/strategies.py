"""Strategies: how the mean of the client models becomes the next global model.

A new strategy is a class here, an entry of `STRATEGIES` and its line in
`fedsim.server.settings.STRATEGIES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord

from fedsim.server.aggregation.aggregator import Aggregator, PlainAggregator
from fedsim.server.aggregation.weights import ClientWeights
from fedsim.server.settings import FederationSettings
from fedsim.server.state import ServerState


class Strategy(ABC):
    """Server side of a federated algorithm.

    Args:
        settings: `federation:` of the experiment.
    """

    takes_weights: ClassVar[bool] = True  # False: `federation.weighting` is ignored, with a notice

    def __init__(self, settings: FederationSettings) -> None:
        self.settings = settings

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


STRATEGIES: Mapping[str, type[Strategy]] = {"fedavg": FedAvg}


def strategy_for(settings: FederationSettings) -> Strategy:
    """Return the strategy that `federation.strategy` names."""
    return STRATEGIES[settings.strategy](settings)
