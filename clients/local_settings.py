"""Settings of local training: the section `local:`, with its schedules of the rate and its views.

Of these, the sampling rate and the number of steps change ε; `privacy:` sets it.

Names and formulas of `local.lr_schedule` are those of `torch.optim.lr_scheduler`, with rounds in
place of epochs: public, and free of ε. The first round after the warmup has t = 0, the round
after it t = 1. A schedule stays at its end.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES, MAX_ROUNDS, MAX_STEPS
from fedsim.core.settings import Settings
from fedsim.zeroth_order.settings import BackwardPasses, ZerothOrderSettings

_Rounds = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
_Factor = Annotated[float, Field(gt=0, le=1)]


class _Schedule(Settings):
    """A learning rate that follows the number of the round."""

    warmup: int = Field(
        default=0,
        ge=0,
        le=MAX_ROUNDS,
        description="rounds before the schedule begins, in which the learning rate grows linearly: "
        "lr · r / (warmup + 1) in round r",
    )

    def rate(self, lr: float, round_number: int) -> float:
        """Return the learning rate of a round.

        Args:
            lr: `local.optimizer.lr`.
            round_number: the round ≥ 1.
        """
        if round_number <= self.warmup:
            return lr * round_number / (self.warmup + 1)
        return self.after_warmup(lr, round_number - self.warmup - 1)

    @abstractmethod
    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup.

        Args:
            lr: `local.optimizer.lr`.
            t: rounds since the warmup, from 0.
        """


class ConstantLr(_Schedule):
    """lr · factor for `total_iters` rounds, then lr; as `ConstantLR`."""

    name: Literal["constant"] = Field(description="the schedule")
    factor: _Factor = Field(default=1.0, description="factor of the first total_iters rounds")
    total_iters: _Rounds = Field(default=5, description="rounds with the factor")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        return lr * self.factor if t < self.total_iters else lr


class StepLr(_Schedule):
    """lr · gamma^⌊t / step_size⌋; as `StepLR`."""

    name: Literal["step"] = Field(description="the schedule")
    step_size: _Rounds = Field(description="rounds between two decays")
    gamma: _Factor = Field(default=0.1, description="factor of a decay")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        return lr * self.gamma ** (t // self.step_size)


class ExponentialLr(_Schedule):
    """lr · gamma^t; as `ExponentialLR`."""

    name: Literal["exponential"] = Field(description="the schedule")
    gamma: _Factor = Field(description="factor of each round")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        return lr * self.gamma**t


class LinearLr(_Schedule):
    """lr · a factor that goes from start_factor to end_factor in `total_iters`; as `LinearLR`."""

    name: Literal["linear"] = Field(description="the schedule")
    start_factor: _Factor = Field(default=1.0, description="factor of the first round")
    end_factor: _Factor = Field(default=0.1, description="factor after total_iters rounds")
    total_iters: _Rounds = Field(description="rounds from the first factor to the last")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        share = min(t, self.total_iters) / self.total_iters
        return lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


class CosineLr(_Schedule):
    """From lr to eta_min by half a cosine in `T_max` rounds; as `CosineAnnealingLR`."""

    name: Literal["cosine"] = Field(description="the schedule")
    T_max: _Rounds = Field(description="rounds from lr to eta_min; then it stays")
    eta_min: float = Field(default=0.0, ge=0, description="learning rate after T_max rounds")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of a round after the warmup."""
        if t >= self.T_max:
            return self.eta_min
        return self.eta_min + (lr - self.eta_min) * (1 + math.cos(math.pi * t / self.T_max)) / 2


LrSchedule = ConstantLr | StepLr | ExponentialLr | LinearLr | CosineLr
"""The schedules; `name` tells them apart."""


MAX_VIEWS = 256
MAX_SHIFT = 1024


class ViewSettings(Settings):
    """One random change of an example: `{shift: 1}`, `flip` or `{noise: 0.1}`."""

    shift: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SHIFT,
        description="most pixels by which an image moves up or down, and left or right; zeros move "
        "in",
    )
    flip: Literal[True] | None = Field(
        default=None, description="an image is mirrored left to right, with probability 1/2"
    )
    noise: float | None = Field(
        default=None, gt=0, description="standard deviation of Gaussian noise on every value"
    )

    @property
    def name(self) -> str:
        """The name of the change."""
        return next(name for name, value in self if value is not None)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value == "flip":
            return {"flip": True}
        raise ValueError(f"must be flip, {{shift: 1}} or {{noise: 0.1}}, got {value[:60]!r}")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        found = [name for name, value in self if value is not None]
        if len(found) != 1:
            names = " and ".join(found) or "none"
            raise ValueError(
                f"an item of the list is one of shift, flip and noise, got {names}; write each as "
                "its own item"
            )
        return self

    @model_serializer
    def _short(self) -> Any:
        return "flip" if self.flip else {self.name: getattr(self, self.name)}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        mapping = {**handler.resolve_ref_schema(handler(schema))}
        mapping |= {"minProperties": 1, "maxProperties": 1}
        return {"anyOf": [{"enum": ["flip"]}, mapping]}


DEFAULT_VIEWS = (ViewSettings(shift=1),)


_ROUNDING = 1e-9  # relative: what rounding may add to a whole number of steps


class SgdSettings(Settings):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = Field(description="the optimizer")
    lr: float = Field(gt=0, description="learning rate")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum factor")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")


class AdamSettings(Settings):
    """Adam, or AdamW with decoupled weight decay."""

    name: Literal["adam", "adamw"] = Field(description="the optimizer")
    lr: float = Field(gt=0, description="learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")


OptimizerSettings = Annotated[SgdSettings | AdamSettings, Field(discriminator="name")]


class LocalSettings(Settings):
    """`local:` in an experiment file: the training of one client in one round."""

    steps: int | None = Field(
        default=None, ge=1, le=MAX_STEPS, description="optimizer steps per round"
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=MAX_STEPS,
        description="passes over a client's examples per round, in place of steps: a client takes "
        "epochs · examples / lot steps, rounded up",
    )
    batch_size: Literal["full"] | Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] = Field(
        description="expected batch (lot); with privacy the sampling rate is batch_size / "
        "declared client size; full: all examples of a client in every step, a sampling rate of 1",
    )
    max_physical_batch: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EXAMPLES,
        description="most examples in memory at once: larger batches are split, with one noise "
        "draw, one charge and one step; null: never",
    )
    optimizer: OptimizerSettings = Field(
        default=SgdSettings(name="sgd", lr=0.1),
        description="made anew each round, as in federated averaging",
    )
    gradient: Literal["backward"] | ZerothOrderSettings = Field(
        default="backward",
        description="backward: gradients by backward passes; {name: zeroth_order, directions: 16}: "
        "slopes along public random directions by forward passes, of which each is one number of "
        "an upload",
    )
    lr_schedule: LrSchedule | None = Field(
        default=None,
        discriminator="name",
        description="how the local learning rate follows the number of the round; null: constant",
    )
    augmentations: int = Field(
        default=1,
        ge=1,
        le=MAX_VIEWS,
        description="random views of each example in a step; its gradient is their mean, clipped "
        "once, at the same ε",
    )
    augment: list[ViewSettings] | None = Field(
        default=None,
        min_length=1,
        description="the random changes of a view, in order, such as `[{shift: 1}, flip]`; null: "
        "`[{shift: 1}]` with more than one view, else none",
    )
    cohort: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=MAX_CLIENTS)] = Field(
        default="auto",
        description="most clients that train together in stacked tensors; auto: by the kind of "
        "model; off: each alone. It changes the last bits of a model, never an ε",
    )

    def __hash__(self) -> int:
        """Return a hash of the values: lists have none."""
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError("needs steps, or epochs in its place, got neither; add steps: 5")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps ({self.steps}) and epochs ({self.epochs:g}) both set the length of a "
                "round; remove one of them, or set it to null (local.steps=null)"
            )
        return self

    def learning_rate(self, round_number: int) -> float:
        """Return the local learning rate of a round: public, whatever the clients have.

        Args:
            round_number: the round ≥ 1.
        """
        lr = self.optimizer.lr
        return lr if self.lr_schedule is None else self.lr_schedule.rate(lr, round_number)

    def optimizer_in(self, round_number: int) -> OptimizerSettings:
        """Return the optimizer of a round, with its learning rate.

        Args:
            round_number: the round ≥ 1.
        """
        if self.lr_schedule is None:
            return self.optimizer
        return self.optimizer.model_copy(update={"lr": self.learning_rate(round_number)})

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer; "sgd" is without momentum and weight decay."""
        settings = self.optimizer
        if isinstance(settings, SgdSettings) and (settings.momentum or settings.weight_decay):
            return "sgd with momentum or weight decay"
        return settings.name

    def without_schedule(self) -> Self:
        """Return the settings with one learning rate in all rounds, as an audit repeats rounds."""
        return self.model_copy(update={"lr_schedule": None})

    @property
    def gradient_facts(self) -> ZerothOrderSettings | BackwardPasses:
        """The public facts of how a step finds its direction."""
        return BackwardPasses() if self.gradient == "backward" else self.gradient

    @property
    def zeroth_order(self) -> ZerothOrderSettings | None:
        """The directions of zeroth-order steps; None: steps follow gradients."""
        return None if self.gradient == "backward" else self.gradient

    @property
    def given_steps(self) -> int:
        """`steps`.

        Raises:
            ValueError: `epochs` take their place, so the steps depend on the client.
        """
        if self.steps is None:
            raise ValueError(f"local.epochs = {self.epochs} gives each client steps of its own")
        return self.steps

    def steps_at_rate(self, rate: float) -> int:
        """Return the optimizer steps of a whole round: `steps`, or as many as `epochs` take.

        Args:
            rate: expected share of a client's examples in a lot, in (0, 1].

        Raises:
            ValueError: the epochs are more than the largest number of steps.
        """
        if self.steps is not None:
            return self.steps
        epochs = self.epochs or 0.0
        steps = max(1, math.ceil(epochs / rate * (1.0 - _ROUNDING)))
        if steps > MAX_STEPS:
            raise ValueError(
                f"local.epochs = {epochs:g} at a sampling rate of {rate:.3g} are {steps:,} steps a "
                f"round, and {MAX_STEPS:,} is the most; use fewer epochs, or larger lots"
            )
        return steps

    @property
    def views(self) -> Sequence[ViewSettings] | None:
        """The random changes of a view; None: examples are used as they are."""
        if self.augment is not None:
            return self.augment
        return DEFAULT_VIEWS if self.augmentations > 1 else None

    def with_equal_views(self) -> Self:
        """Return the settings with as many views of each example, all of them the example itself.

        Checks of the mechanism measure with them what an example adds.
        """
        return self if self.views is None else self.model_copy(update={"augment": []})

    def lot(self, num_examples: int) -> int:
        """Return the expected number of examples in a step of a client.

        Args:
            num_examples: number of the client's examples.
        """
        return num_examples if self.batch_size == "full" else min(self.batch_size, num_examples)
