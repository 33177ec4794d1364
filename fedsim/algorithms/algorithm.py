"""What a federated algorithm is: `init`, `client` and `server` over one `ServerState`.

An algorithm declares what crosses the wire beside the model, and how it uses uploads. Everything
else follows from the declaration: what it may be combined with, what is charged, what a checkpoint
holds, and what a deployed client accepts. So numpy and torch are imported for types alone, and a
file that names an algorithm is checked without them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedsim.algorithms.settings import NoOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedsim.algorithms.state import Arrays, ServerState


@dataclass(frozen=True)
class Sent:
    """Something that crosses the wire in every round beside the model.

    | to      | content         | what it is                                                      |
    |---------|-----------------|-----------------------------------------------------------------|
    | clients | post_processing | a function of earlier uploads: costs no ε                       |
    | server  | private         | a function of a client's examples: refused with `privacy`       |

    Attributes:
        name: its name in requests or replies.
        to: who receives it.
        content: what it is a function of.
        shape: model: an array for each trained parameter; number: one number.
    """

    name: str
    to: Literal["clients", "server"]
    content: Literal["post_processing", "private"]
    shape: Literal["model", "number"] = "model"


@dataclass(frozen=True)
class Training:
    """Public facts of a federation and its local training.

    Attributes:
        parameters: names of the model's trained parameters; other arrays are buffers or frozen.
        num_clients: N.
        learning_rate: of local steps, by the number of the round, from 1.
        momentum: of local SGD.
    """

    parameters: frozenset[str] = frozenset()
    num_clients: int = 1
    learning_rate: Callable[[int], float] = lambda round_number: 1.0
    momentum: float = 0.0


@dataclass(frozen=True)
class Contribution:
    """Public facts of one client's upload, and the private numbers that its algorithm declares.

    Attributes:
        client: its number.
        weight: its planned weight; 1.0 where the algorithm takes none.
        steps: local steps that it took.
        numbers: the numbers that the algorithm declares, by name.
    """

    client: int
    weight: float = 1.0
    steps: int = 1
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What the server has of a round: at least one upload.

    Attributes:
        mean: weighted mean of the clients' models by name, in the types of the model.
        contributions: ascending by client.
        models: the clients' models (n, ...) by name, in the order of the contributions, where the
            algorithm uses each upload by itself; else empty.
    """

    mean: "Arrays"
    contributions: tuple[Contribution, ...] = ()
    models: "Arrays" = field(default_factory=dict)


class ClientRule(ABC):
    """What an algorithm changes in the local steps of a client.

    Guarantee: with DP-SGD the rule sees the release of a step, never a gradient. It is a function
    of releases and of what the server sent: post-processing, which costs no ε.
    """

    @abstractmethod
    def change_(
        self,
        gradient: "Tensor",
        values: "Tensor",
        start: "Tensor",
        sent: Mapping[str, "Tensor"],
    ) -> None:
        """Change the gradient of one step in place, value by value.

        Args:
            gradient: mean gradient or release of each client, of any shape.
            values: their trained values before the step, in the same shape.
            start: the values of the model that they started from, likewise.
            sent: the arrays that the server sent them, by name, likewise.
        """


class Algorithm(ABC):
    """A federated algorithm.

    Args:
        options: the keys beside `name` of `federation.strategy`.
        training: public facts of the federation.

    Attributes:
        name: name in `federation.strategy`; a class of the user's own needs none.
        description: its line in `fedsim list`.
        Options: class of the algorithm's own settings.
        wire: what crosses the wire beside the model.
        takes_weights: whether the algorithm weighs clients; where not, `federation.weighting` is
            ignored, with a notice.
        uses_each_update: whether the server uses each upload by itself, so that the sum of a
            secure aggregation is not enough.
        weighs_steps: whether weights depend on the steps that clients took, as planned weights of
            a secure sum cannot.
        keeps_client_models: whether each client has a model of its own, and these are scored in
            place of the global model.
        needs_plain_sgd: whether local steps must be SGD without momentum and weight decay.

    Raises:
        ValidationError: the options are not those of `Options`.
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
        """Return the names of the numbers of a client's examples that it sends."""
        return tuple(sent.name for sent in cls.wire if sent.to == "server")

    @property
    def least_clients(self) -> int:
        """The fewest clients of a round that the algorithm's proof allows."""
        return 1

    @classmethod
    def sent_arrays(cls) -> tuple[str, ...]:
        """Return the names of the arrays that the server sends beside the model."""
        return tuple(sent.name for sent in cls.wire if sent.to == "clients")

    def init(self, state: "ServerState") -> "ServerState":
        """Return the state before the first round, with the algorithm's own arrays.

        Args:
            state: the initial model.
        """
        return state

    def client(self) -> ClientRule | None:
        """Return what changes in local steps; None: they are plain."""
        return None

    def send(self, state: "ServerState", client: int) -> Mapping[str, "Arrays"]:
        """Return what one client gets beside the model: arrays by parameter, by name in `wire`.

        Args:
            state: the state before the round.
            client: its number.
        """
        return {}

    def start(self, state: "ServerState", client: int) -> "Arrays | None":
        """Return the model that one client starts from; None: the global model.

        Args:
            state: the state before the round.
            client: its number.
        """
        return None

    def scored_models(self, state: "ServerState") -> "list[Arrays] | None":
        """Return the models that are scored on the public test set, each of them the same weight.

        Args:
            state: the state after a round; None: its global model alone.
        """
        return None

    def weight(self, contribution: Contribution) -> float:
        """Return the factor on a client's planned weight.

        Args:
            contribution: public facts of its upload.
        """
        return 1.0

    @abstractmethod
    def server(self, state: "ServerState", update: Update) -> "ServerState":
        """Return the state with the next global model.

        The server itself counts rounds and keeps bounds, withdrawals and averages.

        Args:
            state: the state before the round.
            update: the uploads of the round.
        """

    def trained(self, state: "ServerState") -> "list[tuple[str, np.ndarray]]":
        """Return the trained parameters of the global model by name, in float64."""
        return [
            (name, value.astype("float64"))
            for name, value in state.values.items()
            if name in self.training.parameters
        ]
