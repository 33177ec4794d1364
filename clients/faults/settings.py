"""Settings of injected faults: the section `faults:`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.clients.client_settings import ClientNumber
from fedsim.core.limits import MAX_ROUNDS, MAX_SECONDS
from fedsim.core.settings import Settings

FaultKind = Literal[
    "dropout_before",
    "dropout_during",
    "dropout_after",
    "straggler",
    "error",
    "nan",
    "inf",
    "wrong_shape",
    "empty",
]


class FaultSettings(Settings):
    """One entry of `faults:` in an experiment file."""

    kind: FaultKind = Field(description="what goes wrong")
    clients: list[ClientNumber] | None = Field(
        default=None, min_length=1, description="whom it strikes; null: everybody"
    )
    rounds: list[Annotated[int, Field(ge=1, le=MAX_ROUNDS)]] | None = Field(
        default=None, min_length=1, description="in which rounds; null: in all"
    )
    probability: float = Field(
        default=1.0, gt=0, le=1, description="how often, independently for each client and round"
    )
    delay: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SECONDS,
        description="simulated seconds that a straggler is late by",
    )

    @model_validator(mode="after")
    def _delay_of_stragglers(self) -> Self:
        if (self.kind == "straggler") != (self.delay is not None):
            raise ValueError(
                f"kind straggler, and no other, has a delay in seconds; got kind {self.kind} "
                f"with delay {self.delay}"
            )
        return self
