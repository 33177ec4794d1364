"""Settings of the server: rounds, participation, algorithm, weighting, evaluation, early stopping.

Early stopping costs no ε. Its metrics depend only on released models and public examples, so the
decision is post-processing. Noise is planned for all rounds, but only rounds that ran are charged.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from fedsim.algorithms.algorithm import AlgorithmSettings, algorithms
from fedsim.core.formatting import count_text
from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS, MAX_SECONDS
from fedsim.core.metrics import metric_entry
from fedsim.core.settings import Probability, Settings, Share
from fedsim.server.participation.settings import (
    PartialWorkSettings,
    ParticipationSettings,
    UniformParticipation,
)

Best = tuple[float, int]
"""The best value of the early-stopping metric so far, and the round that reached it."""


class EarlyStoppingSettings(Settings):
    """Settings of early stopping, which ends the run when a metric no longer improves."""

    metric: str = Field(
        default="loss",
        description="metric of the global model on the public test set: loss, or one of "
        "evaluation.metrics",
    )
    patience: int = Field(
        ge=1, le=MAX_ROUNDS, description="rounds without an improvement after which the run ends"
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="a change of the metric by more than this is an improvement"
    )
    goal: Literal["min", "max"] | None = Field(
        default=None,
        description="whether smaller or larger values are better; null: smaller for loss, log_loss "
        "and errors, larger for the others",
    )

    def next_best(self, best: Best | None, value: object, round_number: int) -> Best | None:
        """Return the best value of the metric up to a round, and the round that reached it.

        Args:
            best: the best value before the round; None before the first value.
            value: the metric after the round; ignored if it is not a finite number.
            round_number: the round, from 1.
        """
        if not isinstance(value, int | float) or not math.isfinite(value):
            return best
        sign = 1.0 if self._smaller_is_better else -1.0
        if best is None or sign * (best[0] - value) > self.min_delta:
            return float(value), round_number
        return best

    def reason_to_stop(self, best: Best | None, round_number: int) -> str | None:
        """Return the reason to end the run after a round, or None to continue.

        Args:
            best: the best value so far and the round that reached it; None before the first value.
            round_number: the number of finished rounds.
        """
        value, since = best or (math.nan, 0)
        if round_number - since < self.patience:
            return None
        best_text = f"{value:.4g} in round {since}" if since else "there was no finite value"
        return (
            f"test_{self.metric} has not improved by more than {self.min_delta:g} for "
            f"{count_text(self.patience, 'round')}; best: {best_text} (federation.early_stopping)"
        )

    @property
    def _smaller_is_better(self) -> bool:
        smaller = metric_entry(self.metric).smaller_is_better
        return smaller if self.goal is None else self.goal == "min"


WeightingName = Literal["uniform", "examples", "examples_over_noise"]
_DEFAULT_ALGORITHM = "fedavg"
_Power = Annotated[float, Field(ge=0, le=4)]


class WeightingSettings(Settings):
    """Settings of the clients' weights in the mean (`federation.weighting`).

    A weight is n^size_power / z^noise_power, with n the client's public number of examples and z
    its noise multiplier divided by its sampling rate.
    """

    name: WeightingName = Field(description="name of the weighting; see `federation.weighting`")
    size_power: _Power | None = Field(
        default=None,
        description="exponent of the number of examples, for examples_over_noise; null: 1",
    )
    noise_power: _Power | None = Field(
        default=None,
        description="exponent of 1 / noise multiplier, for examples_over_noise; null: 1",
    )
    max_share: Share | None = Field(
        default=None,
        description="largest share of a client in the weights of a round to which all clients "
        "reply; heavier clients weigh less; null: no bound",
    )

    @property
    def powers(self) -> tuple[float, float]:
        """Exponents (size_power, noise_power) in a client's weight n^size_power / z^noise_power."""
        if self.name != "examples_over_noise":
            return (1.0 if self.name == "examples" else 0.0), 0.0
        by_size, by_noise = self.size_power, self.noise_power
        return (1.0 if by_size is None else by_size), (1.0 if by_noise is None else by_noise)

    @property
    def is_uniform(self) -> bool:
        """Whether all clients have the same weight."""
        return self.powers == (0.0, 0.0)

    @property
    def uses_sizes(self) -> bool:
        """Whether weights depend on the clients' numbers of examples, and so reveal them."""
        return self.powers[0] > 0.0

    @model_validator(mode="after")
    def _keys_of_noise(self) -> Self:
        for key in ("size_power", "noise_power"):
            if self.name != "examples_over_noise" and getattr(self, key) is not None:
                raise ValueError(
                    f"{key} belongs to name: examples_over_noise, got name: {self.name}"
                )
        return self


class FederationSettings(Settings):
    """The section `federation:` of an experiment file: rounds, clients per round, algorithm."""

    rounds: int = Field(ge=1, le=MAX_ROUNDS, description="federated rounds")
    clients_per_round: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CLIENTS,
        description="clients that train in a round; null: all of them",
    )
    participation: ParticipationSettings = Field(
        default=UniformParticipation(),
        discriminator="scheme",
        description="how the clients of a round are drawn",
    )
    partial_work: PartialWorkSettings | None = Field(
        default=None,
        description="stragglers, which do a part of their local work; null: none",
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
        description="fewest updates of a round in which clients failed; a round with fewer ends "
        "the run",
    )
    strategy: str | AlgorithmSettings = Field(
        default=_DEFAULT_ALGORITHM,
        description="the federated algorithm: a built-in name, package.module:Class or "
        "./file.py:Class, also a strategy of Flower; or a mapping with settings",
    )
    early_stopping: EarlyStoppingSettings | None = Field(
        default=None,
        description="ends the run when a metric on the public test set no longer improves; null: "
        "all rounds run",
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of the exponential moving average of the global models, which is then "
        "the model that is evaluated and saved; null: the last global model",
    )
    weighting: WeightingName | WeightingSettings = Field(
        default="uniform",
        description="weight of a client's update: uniform: 1; examples: its number of examples; "
        "examples_over_noise: its number of examples over its noise multiplier; a mapping sets the "
        "exponents and the largest share",
    )

    @property
    def weights(self) -> WeightingSettings:
        """Settings of the weighting, with defaults for everything that the file leaves out."""
        named = self.weighting
        return WeightingSettings(name=named) if isinstance(named, str) else named

    @property
    def algorithm(self) -> AlgorithmSettings:
        """Settings of the algorithm, with defaults for everything that the file leaves out."""
        named = self.strategy
        return AlgorithmSettings(name=named) if isinstance(named, str) else named

    @field_validator("strategy")
    @classmethod
    def _defaults_of_the_algorithm(cls, given: str | AlgorithmSettings) -> str | AlgorithmSettings:
        """Add the default settings of a built-in algorithm; the file's rules report wrong settings.

        `fedavg` without settings stays a name.
        """
        named = AlgorithmSettings(name=given) if isinstance(given, str) else given
        kind = algorithms().get(named.name)
        if kind is None or not kind.Options.model_fields or given == _DEFAULT_ALGORITHM:
            return given
        try:
            settings = kind.Options.model_validate(named.options)
        except ValidationError:
            return given
        return AlgorithmSettings.model_validate({"name": named.name, **settings.model_dump()})


class EvaluationSettings(Settings):
    """The section `evaluation:`: metrics on the public test set, and on clients' own examples."""

    metrics: list[str] | None = Field(
        default=None,
        min_length=1,
        description="metrics of the global model on the public test set, the main one first: "
        "built-in names (see `fedsim list`), package.module:function or ./file.py:function; null: "
        "accuracy, or mse and r2",
    )
    group: str | None = Field(
        default=None,
        description="column of the data, such as a hospital, that divides the public test set into "
        "groups, whose accuracies a run records one by one; null: no groups",
    )
    holdout: Probability | None = Field(
        default=None,
        description="share of each client's examples that it never trains on and evaluates the "
        "global model on, only without differential privacy; null: clients do not evaluate",
    )
    every_rounds: int = Field(
        default=1,
        ge=1,
        le=MAX_ROUNDS,
        description="rounds between evaluations by clients; the last is always evaluated",
    )
    clients: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CLIENTS,
        description="clients that evaluate, chosen by the seed each time; null: all of them",
    )

    @model_validator(mode="after")
    def _keys_of_clients(self) -> Self:
        given = [
            name
            for name, value in (("every_rounds", self.every_rounds > 1), ("clients", self.clients))
            if value
        ]
        if self.holdout is None and given:
            raise ValueError(
                f"{given[0]} is for evaluation on clients, which needs holdout, the share of its "
                f"examples that a client evaluates on; add holdout: 0.2, or remove {given[0]}"
            )
        return self
