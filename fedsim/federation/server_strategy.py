"""The strategy of an experiment's server, checked before the first round."""

from pathlib import Path

from torch import nn

from fedsim.experiment import Experiment
from fedsim.protocol.arrays import to_arrays
from fedsim.server.aggregation.strategies import Strategy
from fedsim.server.aggregation.strategy_registry import (
    STRATEGIES,
    StrategyError,
    check_strategy,
    strategy_for,
)


def strategy_of(experiment: Experiment, model: nn.Module, base: Path) -> Strategy:
    """Return a new object of the experiment's strategy.

    Args:
        experiment: the settings.
        model: the global model; its trained parameters take the steps of a server optimizer.
        base: the directory in which relative paths start.

    Raises:
        StrategyError: there is no such strategy, or it does not take its settings.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    return strategy_for(
        experiment.federation,
        base=base,
        parameters=[name for name, value in parameters if value.requires_grad],
    )


def checked_strategy(experiment: Experiment, model: nn.Module, base: Path) -> Strategy:
    """Return the experiment's strategy; one of the user's own is tried on the initial model.

    Args:
        experiment: the settings.
        model: the initial model.
        base: the directory in which relative paths start.

    Raises:
        StrategyError: as `strategy_of`, an update fails, or it has an aggregator of its own and
            clients send parts of sums.
    """
    strategy = strategy_of(experiment, model, base)
    trust = "local" if experiment.privacy is None else experiment.privacy.trust
    if trust != "local" and type(strategy).aggregator is not Strategy.aggregator:
        raise StrategyError(
            f"federation.strategy {experiment.federation.strategy_settings.name!r} has an "
            f"aggregator of its own, and with privacy.trust: {trust} only the sum of the "
            "updates may be used; use another strategy, or trust: local"
        )
    if experiment.federation.strategy_settings.name not in STRATEGIES:
        arrays = {name: value.cpu().numpy() for name, value in model.state_dict().items()}
        check_strategy(strategy, to_arrays(arrays))
    return strategy
