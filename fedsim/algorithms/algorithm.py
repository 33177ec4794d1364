"""Federated algorithms: their base class, the settings that choose one, and the built-in ones.

An algorithm declares how it uses uploads, and which values messages carry beside the model. These
declarations fix the allowed settings, the privacy loss that clients are charged, the content of a
checkpoint, and the messages that a client accepts. The module can be imported without numpy and
torch.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from fedsim.algorithms import built_in
from fedsim.core.commands import ByName
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedsim.algorithms.state import Arrays, ServerState


@dataclass(frozen=True)
class Sent:
    """Declaration of a value that messages carry beside the model in every round.

    | to      | content         | meaning                                                         |
    |---------|-----------------|-----------------------------------------------------------------|
    | clients | post_processing | a function of earlier uploads: costs no ε                       |
    | server  | private         | a function of a client's examples: refused with `privacy`       |

    Attributes:
        name: the name of the value in requests or replies.
        to: the receiver of the value.
        content: whether the value costs no ε or is private; see the table.
        shape: "model" for one array per trained parameter, "number" for one number.
    """

    name: str
    to: Literal["clients", "server"]
    content: Literal["post_processing", "private"]
    shape: Literal["model", "number"] = "model"


@dataclass(frozen=True)
class Training:
    """Public facts about a federation and its local training, for use by an algorithm.

    Attributes:
        parameters: the names of the model's trained parameters; other arrays are buffers or frozen.
        num_clients: the number of clients of the federation, N.
        learning_rate: function that returns the learning rate of local steps in a round (from 1).
        momentum: the momentum of local SGD.
    """

    parameters: frozenset[str] = frozenset()
    num_clients: int = 1
    learning_rate: Callable[[int], float] = lambda round_number: 1.0
    momentum: float = 0.0


@dataclass(frozen=True)
class Contribution:
    """Public facts about one client's upload, and the private numbers that the client sent.

    Attributes:
        client: the client's number.
        weight: the client's weight, planned before training; 1.0 if the algorithm uses no weights.
        steps: the number of local steps that the client took.
        numbers: the private numbers that the algorithm declares, by name.
    """

    client: int
    weight: float = 1.0
    steps: int = 1
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """The aggregated uploads of a round, from at least one client.

    Attributes:
        mean: the weighted mean of the clients' models by name, in the dtypes of the model.
        contributions: the contribution of each participant, ascending by client.
        models: the stacked models of n clients, arrays (n, ...) by name, in the order of
            `contributions`. Empty unless the algorithm declares `uses_each_update`.
    """

    mean: "Arrays"
    contributions: tuple[Contribution, ...] = ()
    models: "Arrays" = field(default_factory=dict)


class ClientRule(ABC):
    """Rule with which an algorithm changes the gradient in each local step of a client.

    Guarantee: with DP-SGD the rule gets the noisy gradient of a step, never the raw gradient. It
    uses only noisy gradients and arrays from the server, so it is post-processing and costs no ε.
    """

    @abstractmethod
    def change_(
        self,
        gradient: "Tensor",
        values: "Tensor",
        start: "Tensor",
        sent: Mapping[str, "Tensor"],
    ) -> None:
        """Change the gradient of one step in place, each value independently of the others.

        Args:
            gradient: the mean gradient of one or more clients (with DP-SGD noisy), of any shape.
            values: the clients' trained values before the step, in the shape of `gradient`.
            start: the clients' values at the start of the round, in the shape of `gradient`.
            sent: the arrays that the server sent, by name, each in the shape of `gradient`.
        """


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


class Algorithm(ABC):
    """Base class of federated algorithms; subclasses implement `server`.

    Args:
        options: the keys of `federation.strategy` beside `name`.
        training: public facts about the federation and its local training.

    Attributes:
        name: the algorithm's name in `federation.strategy`; a user's class needs no name.
        description: the algorithm's line in `fedsim list`.
        Options: the class of the algorithm's settings.
        wire: the declarations of values that messages carry beside the model.
        takes_weights: whether the algorithm weighs clients; if not, `federation.weighting` is
            ignored with a notice.
        uses_each_update: whether the server needs each upload, so that the sum of secure
            aggregation does not suffice.
        weighs_steps: whether weights depend on the steps that clients took. This excludes secure
            sums, because the weights in a secure sum are planned in advance.
        keeps_client_models: whether each client has a personal model, and these models are
            evaluated in place of the global model.
        needs_plain_sgd: whether local steps must be SGD without momentum and weight decay.

    Raises:
        ValidationError: the options do not fit `Options`.
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    Options: ClassVar[type[Settings]] = NoOptions
    wire: ClassVar[tuple[Sent, ...]] = ()
    takes_weights: ClassVar[bool] = True
    uses_each_update: ClassVar[bool] = False
    weighs_steps: ClassVar[bool] = False
    keeps_client_models: ClassVar[bool] = False
    needs_plain_sgd: ClassVar[bool] = False
    options: Any

    def __init__(
        self, options: Mapping[str, Any] | None = None, training: Training | None = None
    ) -> None:
        self.options = self.Options.model_validate(dict(options or {}))
        self.training = Training() if training is None else training

    @classmethod
    def private_numbers(cls) -> tuple[str, ...]:
        """Return the names of the private numbers that a client sends, as `wire` declares."""
        return tuple(sent.name for sent in cls.wire if sent.to == "server")

    @property
    def least_clients(self) -> int:
        """Smallest number of clients in a round for which the algorithm's guarantee holds."""
        return 1

    @classmethod
    def sent_arrays(cls) -> tuple[str, ...]:
        """Return the names of the arrays that the server sends beside the model."""
        return tuple(sent.name for sent in cls.wire if sent.to == "clients")

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state before the first round, with the algorithm's own initial arrays added.

        Args:
            state: the state with the initial model.
        """
        return state

    def client(self) -> ClientRule | None:
        """Return the rule that changes a client's local steps, or None for plain local steps."""
        return None

    def send(self, state: "ServerState", client: int) -> Mapping[str, "Arrays"]:
        """Return the arrays that one client gets beside the model, by their names in `wire`.

        Args:
            state: the server state before the round.
            client: the client's number.

        Returns:
            For each declared name, an array for each trained parameter, by parameter name.
        """
        return {}

    def start(self, state: "ServerState", client: int) -> "Arrays | None":
        """Return the model from which a client starts, or None for the global model.

        Args:
            state: the server state before the round.
            client: the client's number.
        """
        return None

    def scored_models(self, state: "ServerState") -> "list[Arrays] | None":
        """Return the models whose metrics are averaged, with equal weights.

        The result is None if only the global model is evaluated.

        Args:
            state: the server state after a round.
        """
        return None

    def weight(self, contribution: Contribution) -> float:
        """Return the factor by which a client's planned weight is multiplied.

        Args:
            contribution: the facts about the client's upload.
        """
        return 1.0

    @abstractmethod
    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the server state with the next global model.

        The caller updates the round number, clip norms, withdrawals and averages in the state.

        Args:
            state: the server state before the round.
            update: the aggregated uploads of the round.
        """

    def trained(self, state: "ServerState") -> "list[tuple[str, np.ndarray]]":
        """Return the name and the float64 value of each trained parameter of the global model."""
        return [
            (name, value.astype("float64"))
            for name, value in state.values.items()
            if name in self.training.parameters
        ]


class _BuiltIn(ByName[type[Algorithm]]):
    """The built-in algorithms by name; the algorithm NAME is in the file `built_in/NAME.py`."""

    def __getitem__(self, name: str) -> type[Algorithm]:
        module = import_module(self.places[name])
        kinds = (value for value in vars(module).values() if isinstance(value, type))
        (kind,) = (kind for kind in kinds if issubclass(kind, Algorithm) and kind.name == name)
        return kind


@cache
def algorithms() -> Mapping[str, type[Algorithm]]:
    """Return the built-in algorithm classes by name, in alphabetical order."""
    modules = pkgutil.iter_modules(built_in.__path__)
    names = sorted(module.name for module in modules)
    return _BuiltIn({name: f"{built_in.__name__}.{name}" for name in names})
