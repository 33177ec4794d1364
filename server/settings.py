"""Settings of the server: rounds, participation, strategy, weighting, evaluation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS, MAX_SECONDS
from fedsim.core.settings import Probability, Settings, Share

STRATEGIES = {"fedavg": "federated averaging (McMahan et al. 2017), summed in a fixed order"}


WeightingName = Literal["uniform", "examples", "noise"]
_Power = Annotated[float, Field(ge=0, le=4)]


class WeightingSettings(Settings):
    """`federation.weighting`: a client's weight is n^size_power / z^noise_power.

    n is its public number of examples, and z its noise multiplier over its sampling rate.
    """

    name: WeightingName = Field(description="which weights; see `federation.weighting`")
    size_power: _Power | None = Field(
        default=None, description="power of the number of examples, with noise; null: 1"
    )
    noise_power: _Power | None = Field(
        default=None, description="power of 1 / noise, with noise; null: 1"
    )
    max_share: Share | None = Field(
        default=None,
        description="largest share of a client in the weights of a round to which all clients "
        "reply; heavier clients weigh less; null: no bound",
    )

    @property
    def powers(self) -> tuple[float, float]:
        """The powers of the number of examples and of 1 / noise."""
        if self.name != "noise":
            return (1.0 if self.name == "examples" else 0.0), 0.0
        by_size, by_noise = self.size_power, self.noise_power
        return (1.0 if by_size is None else by_size), (1.0 if by_noise is None else by_noise)

    @property
    def is_uniform(self) -> bool:
        """Whether all clients have the same weight."""
        return self.powers == (0.0, 0.0)

    @property
    def uses_sizes(self) -> bool:
        """Whether weights reveal numbers of examples."""
        return self.powers[0] > 0.0

    @model_validator(mode="after")
    def _keys_of_noise(self) -> Self:
        for key in ("size_power", "noise_power"):
            if self.name != "noise" and getattr(self, key) is not None:
                raise ValueError(f"{key} belongs to name: noise, got name: {self.name}")
        return self


class FederationSettings(Settings):
    """`federation:` in an experiment file."""

    rounds: int = Field(ge=1, le=MAX_ROUNDS, description="federated rounds")
    clients_per_round: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CLIENTS,
        description="clients that train in a round; null: all of them",
    )
    deadline: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SECONDS,
        description="seconds after which a client's update comes too late for its round; in a "
        "simulation only injected delays count",
    )
    min_participants: int = Field(
        default=1,
        ge=0,
        le=MAX_CLIENTS,
        description="a round in which clients failed and fewer updates came ends the run",
    )
    strategy: Literal["fedavg"] = Field(
        default="fedavg", description="how updates become the next global model"
    )
    weighting: WeightingName | WeightingSettings = Field(
        default="uniform",
        description="weight of a client's update: equal, its number of examples, or that over its "
        "noise multiplier (noise); a mapping sets powers and the largest share",
    )

    @property
    def weights(self) -> WeightingSettings:
        """The weighting with its settings."""
        named = self.weighting
        return WeightingSettings(name=named) if isinstance(named, str) else named


class EvaluationSettings(Settings):
    """`evaluation:` in an experiment file: the global model on examples that clients hold out."""

    holdout: Probability = Field(
        default=0.2,
        description="share of each client's examples that it never trains on",
    )
    every: int = Field(
        default=1,
        ge=1,
        le=MAX_ROUNDS,
        description="rounds between evaluations; the last is always evaluated",
    )
    clients: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CLIENTS,
        description="clients that evaluate, chosen by the seed each time; null: all of them",
    )
