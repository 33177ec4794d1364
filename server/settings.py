"""Settings of the server: rounds, participation, strategy, weighting, evaluation."""

from typing import Literal

from pydantic import Field

from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS, MAX_SECONDS
from fedsim.core.settings import Probability, Settings

STRATEGIES = {"fedavg": "federated averaging (McMahan et al. 2017), summed in a fixed order"}


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
    weighting: Literal["uniform", "examples"] = Field(
        default="uniform",
        description="weight of a client's update: equal, or its number of examples",
    )


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
