"""Adapter that runs Flower strategies: `federation.strategy: package.module:Class`.

fedsim draws the clients and sends the requests; the Flower strategy aggregates. Further keys of
`federation.strategy` are arguments of the strategy's constructor. Between rounds, attributes of the
strategy that are arrays or numbers are kept in the server state. So a run can be resumed and
replayed.
"""

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from pydantic import ConfigDict, create_model

from fedsim.algorithms.algorithm import Algorithm, Training, Update
from fedsim.algorithms.state import Arrays, ServerState
from fedsim.core.settings import Settings
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.protocol.flower_internals import server_identity

# fedsim draws the clients, so a strategy must wait for no node, and must ask all that it gets.
_FIXED = {
    "fraction_train": 1.0,
    "fraction_evaluate": 1.0,  # 0 logs a warning in every round; fedsim evaluates, not the strategy
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 1,
}
_NOT_SETTINGS = ("_key", "_fn")  # suffixes of arguments for record names and metric functions
_ROUND = "server-round"


class FlowerAlgorithm(Algorithm):
    """Algorithm that aggregates with a Flower strategy, by `configure_train` and `aggregate_train`.

    The strategy gets a reply from each client. The reply holds the client's model, and the client's
    planned weight as `num-examples`.

    Raises:
        ValueError: in `server`, if the strategy sends clients settings that fedsim's clients do not
            read, returns no model, or changes an attribute that is neither arrays nor a number.
    """

    uses_each_update: ClassVar[bool] = True
    kind: ClassVar[type[Strategy]]

    def __init__(
        self, options: Mapping[str, Any] | None = None, training: Training | None = None
    ) -> None:
        super().__init__(options, training)
        self._make()  # raises before the first round if the strategy refuses the arguments

    def init(self, state: ServerState) -> ServerState:
        """Return the state with the initial attributes of the strategy."""
        return state.with_memory(_kept(self._make(), {}))

    def server(self, state: ServerState, update: Update) -> ServerState:
        """Return the state with the strategy's next model and the strategy's new attributes."""
        strategy, number = self._make(), state.round_number + 1
        parts = vars(strategy).items()
        first = {n: copy(v) if isinstance(v, list | dict | set) else v for n, v in parts}
        _put_back(strategy, state.memory)
        nodes = [contribution.client + 1 for contribution in update.contributions]
        with server_identity(run_id=1), _without_progress():
            asked = list(
                strategy.configure_train(
                    number, state.arrays, ConfigRecord(), cast(Grid, _Nodes(nodes))
                )
            )
            _check_requests(asked)
            replies = list(_replies(update, nodes))
            arrays, _ = strategy.aggregate_train(number, replies)
        if arrays is None:
            raise ValueError("aggregate_train returned no model")
        values = to_numpy(arrays)
        kept = _kept(strategy, first)
        return state.with_model({**update.mean, **values}).with_memory(kept)

    def _make(self) -> Strategy:
        known = inspect.signature(self.kind).parameters
        fixed = {name: value for name, value in _FIXED.items() if name in known}
        given = {name: value for name, value in self.options if value is not _UNSET}
        return self.kind(**fixed, **given)


_UNSET = "(as the strategy has it)"


def of_flower(kind: type[Strategy], name: str) -> type[Algorithm]:
    """Return an algorithm class that runs a Flower strategy class.

    Args:
        kind: the strategy class.
        name: the name of the class in the experiment.
    """
    fields: dict[str, Any] = {
        argument.name: (Any, ... if argument.default is argument.empty else _UNSET)
        for argument in inspect.signature(kind).parameters.values()
        if argument.kind in (argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD)
        and argument.name not in _FIXED
        and not argument.name.endswith(_NOT_SETTINGS)
    }
    options = create_model(f"{kind.__name__}Options", __base__=_FlowerOptions, **fields)
    return type(kind.__name__, (FlowerAlgorithm,), {"Options": options, "kind": kind})


class _FlowerOptions(Settings):
    """The arguments of a strategy's constructor, as settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class _Nodes:
    """The part of a grid that `configure_train` uses: the node ids of a round's clients."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of the round's clients."""
        return list(self._nodes)


@contextmanager
def _without_progress() -> Iterator[None]:
    """Hide Flower's log messages of every round in a `with` block, but not its warnings."""
    flower = logging.getLogger("flwr")
    before = flower.level
    flower.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flower.setLevel(before)


def _check_requests(asked: list[Message]) -> None:
    """Check that a strategy sends clients no settings beside the round, as none would be read."""
    for message in asked:
        for record in message.content.config_records.values():
            extra = sorted(set(record) - {_ROUND})
            if extra:
                raise ValueError(
                    f"it sends {', '.join(extra)} to clients, which fedsim's clients do not read; "
                    "use a built-in strategy, see `fedsim list strategies`"
                )


def _replies(update: Update, nodes: list[int]) -> Iterator[Message]:
    for k, (contribution, node) in enumerate(zip(update.contributions, nodes, strict=True)):
        arrays = to_arrays({name: rows[k] for name, rows in update.models.items()})
        metrics = MetricRecord({"num-examples": contribution.weight})
        asked = Message(RecordDict(), node, MessageType.TRAIN)
        yield Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=asked)


def _kept(strategy: Strategy, first: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the strategy's attributes that are arrays or numbers, as arrays by name.

    Another attribute must be as in `first`, the attributes before the first round; with an empty
    `first` it may be anything.
    """
    kept: dict[str, np.ndarray] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, ArrayRecord):
            kept |= {f"{name}/r/{key}": array for key, array in to_numpy(value).items()}
        elif isinstance(value, np.ndarray):
            kept[f"{name}/a"] = value
        elif isinstance(value, dict) and {str} == set(map(type, value)) and _arrays(value.values()):
            kept |= {f"{name}/d/{key}": array for key, array in value.items()}
        elif isinstance(value, list) and value and _arrays(value):
            kept |= {f"{name}/l/{index:09d}": array for index, array in enumerate(value)}
        elif isinstance(value, bool | int | float | np.number):
            kept[f"{name}/n"] = np.array(value)
        elif first and (name not in first or first[name] != value):
            raise ValueError(
                f"it changed its attribute {name!r} to a {type(value).__name__}, which a "
                "checkpoint cannot hold; keep arrays, lists of arrays, dicts of arrays by text, or "
                "numbers"
            )
    return kept


def _arrays(values: Iterable[object]) -> bool:
    return all(isinstance(value, np.ndarray) for value in values)


def _put_back(strategy: Strategy, memory: Arrays) -> None:
    """Set a strategy's attributes from the arrays that `_kept` returned."""
    attributes, records = dict[str, Any](), set[str]()
    for path, value in sorted(memory.items()):
        name, _, rest = path.partition("/")
        kind, _, key = rest.partition("/")
        if kind == "a":
            attributes[name] = value
        elif kind == "n":
            attributes[name] = value.item()
        elif kind == "l":
            attributes.setdefault(name, []).append(value)
        else:
            attributes.setdefault(name, {})[key] = value
            if kind == "r":
                records.add(name)
    for name, value in attributes.items():
        setattr(strategy, name, to_arrays(value) if name in records else value)
