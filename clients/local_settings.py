"""Settings of local training (section `local:`), with learning-rate schedules and augmentation.

Of these settings only `batch_size` (which sets the sampling rate), `steps` and `epochs` change ε.

Names and formulas of `local.lr_schedule` are those of `torch.optim.lr_scheduler`, with rounds in
place of epochs. A schedule is public, so it costs no ε. In the formulas, t counts the rounds after
the warmup, from 0. After its last round a schedule keeps its last value.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES, MAX_ROUNDS, MAX_STEPS
from fedsim.core.settings import Settings
from fedsim.zeroth_order.settings import BackwardPasses, ZerothOrderSettings

_Rounds = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
_Factor = Annotated[float, Field(gt=0, le=1)]


class _Schedule(Settings):
    """Base of the learning-rate schedules: a learning rate as a function of the round."""

    warmup: int = Field(
        default=0,
        ge=0,
        le=MAX_ROUNDS,
        description="rounds before the schedule begins, in which the learning rate grows linearly: "
        "it is lr · r / (warmup + 1) in round r",
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
            t: number of the round after the warmup, from 0.
        """


class ConstantLr(_Schedule):
    """Schedule with learning rate lr · factor for `total_iters` rounds, then lr (`ConstantLR`)."""

    name: Literal["constant"] = Field(description="the schedule")
    factor: _Factor = Field(default=1.0, description="factor of the first total_iters rounds")
    total_iters: _Rounds = Field(default=5, description="number of rounds with the factor")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of round t, with t = 0 for the first round after the warmup."""
        return lr * self.factor if t < self.total_iters else lr


class StepLr(_Schedule):
    """Schedule with learning rate lr · gamma^⌊t / step_size⌋ in round t after warmup (`StepLR`)."""

    name: Literal["step"] = Field(description="the schedule")
    step_size: _Rounds = Field(description="rounds between two decays")
    gamma: _Factor = Field(default=0.1, description="factor of a decay")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of round t, with t = 0 for the first round after the warmup."""
        return lr * self.gamma ** (t // self.step_size)


class ExponentialLr(_Schedule):
    """Schedule with learning rate lr · gamma^t in round t after warmup (`ExponentialLR`)."""

    name: Literal["exponential"] = Field(description="the schedule")
    gamma: _Factor = Field(description="factor of each round")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of round t, with t = 0 for the first round after the warmup."""
        return lr * self.gamma**t


class LinearLr(_Schedule):
    """Schedule with learning rate lr times a factor that changes linearly (`LinearLR`)."""

    name: Literal["linear"] = Field(description="the schedule")
    start_factor: _Factor = Field(default=1.0, description="factor of the first round")
    end_factor: _Factor = Field(default=0.1, description="factor after total_iters rounds")
    total_iters: _Rounds = Field(description="rounds from the first factor to the last")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of round t, with t = 0 for the first round after the warmup."""
        share = min(t, self.total_iters) / self.total_iters
        return lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


class CosineLr(_Schedule):
    """Schedule whose learning rate falls from lr to eta_min by half a cosine.

    In torch, this is `CosineAnnealingLR`.
    """

    name: Literal["cosine"] = Field(description="the schedule")
    T_max: _Rounds = Field(description="rounds from lr to eta_min, which all later rounds keep")
    eta_min: float = Field(default=0.0, ge=0, description="learning rate after T_max rounds")

    def after_warmup(self, lr: float, t: int) -> float:
        """Return the learning rate of round t, with t = 0 for the first round after the warmup."""
        if t >= self.T_max:
            return self.eta_min
        return self.eta_min + (lr - self.eta_min) * (1 + math.cos(math.pi * t / self.T_max)) / 2


LrSchedule = ConstantLr | StepLr | ExponentialLr | LinearLr | CosineLr
"""Settings of a learning-rate schedule; the key `name` chooses the class."""


MAX_VIEWS = 256
MAX_SHIFT = 1024


class ViewSettings(Settings):
    """One random change of an example: `{shift: 1}`, `flip` or `{noise: 0.1}`."""

    shift: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SHIFT,
        description="largest number of pixels by which an image moves up or down, and left or "
        "right; zeros fill the gap",
    )
    flip: Literal[True] | None = Field(
        default=None, description="an image is mirrored left to right, with probability 1/2"
    )
    noise: float | None = Field(
        default=None, gt=0, description="standard deviation of Gaussian noise on every value"
    )

    @property
    def name(self) -> str:
        """Name of the random change: shift, flip or noise."""
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
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
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


_LARGEST_ADAM_STEP = 7.3  # in learning rates
_ROUNDING = 1e-9  # largest relative rounding error of a whole number of steps


class SgdSettings(Settings):
    """Settings of stochastic gradient descent."""

    name: Literal["sgd"] = Field(description="the optimizer")
    lr: float = Field(gt=0, description="learning rate")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum factor")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")

    def largest_change(self, largest_gradient: float, steps: int) -> float | None:
        """Return a bound on how far all steps of a round together move any single parameter.

        Args:
            largest_gradient: upper bound of each value of each step's gradient.
            steps: number of steps.

        Returns:
            The bound, or None with weight decay: it changes a parameter by a share of its value.
        """
        if self.weight_decay:
            return None
        return steps * self.lr * largest_gradient / (1.0 - self.momentum)


class AdamSettings(Settings):
    """Settings of Adam, or of AdamW with decoupled weight decay."""

    name: Literal["adam", "adamw"] = Field(description="the optimizer")
    lr: float = Field(gt=0, description="learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")

    def largest_change(self, largest_gradient: float, steps: int) -> float | None:
        """Return a bound on how far all steps of a round together move any single parameter.

        A step moves a parameter by lr · |m| / √v, with Adam's moments m and v and decay rates β₁
        and β₂. By Cauchy and Schwarz, |m| / √v is at most (1 − β₁) / √((1 − β₂)(1 − β₁² / β₂)) =
        7.27 for any gradients. The bias correction of the moments only lowers this ratio.

        Args:
            largest_gradient: unused, as Adam divides by the size of the gradients.
            steps: number of steps.

        Returns:
            The bound, or None with weight decay: it changes a parameter by a share of its value.
        """
        return None if self.weight_decay else steps * self.lr * _LARGEST_ADAM_STEP


OptimizerSettings = Annotated[SgdSettings | AdamSettings, Field(discriminator="name")]


class LocalSettings(Settings):
    """The section `local:` of an experiment file: how a client trains in a round."""

    steps: int | None = Field(
        default=None, ge=1, le=MAX_STEPS, description="optimizer steps per round"
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=MAX_STEPS,
        description="passes over a client's examples per round, in place of steps: a client takes "
        "epochs · examples / expected batch size steps, rounded up",
    )
    batch_size: Literal["full"] | Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] = Field(
        description="expected number of examples in a (logical) batch; with privacy the sampling "
        "rate is batch_size / declared client size; full: all examples of a client in every step, "
        "a sampling rate of 1",
    )
    max_physical_batch: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EXAMPLES,
        description="largest physical batch, in examples: larger batches are split, with one noise "
        "draw, one charge and one step; null: batches are never split",
    )
    optimizer: OptimizerSettings = Field(
        default=SgdSettings(name="sgd", lr=0.1),
        description="the optimizer of local steps, made anew each round as in federated averaging",
    )
    gradient: Literal["backward"] | ZerothOrderSettings = Field(
        default="backward",
        description="backward: gradients by backward passes; {name: zeroth_order, directions: 16}: "
        "slopes along public random directions by forward passes, where each slope is one number "
        "of an upload",
    )
    lr_schedule: LrSchedule | None = Field(
        default=None,
        discriminator="name",
        description="schedule of the local learning rate over rounds; null: constant",
    )
    augmentation_multiplicity: int = Field(
        default=1,
        ge=1,
        le=MAX_VIEWS,
        description="number of random views of each example in a step; the example's gradient is "
        "the mean over its views, clipped once, at the same ε",
    )
    augmentations: list[ViewSettings] | None = Field(
        default=None,
        min_length=1,
        description="the random changes of a view, in order, such as `[{shift: 1}, flip]`; null: "
        "`[{shift: 1}]` with more than one view, else none",
    )
    vectorized_clients: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=MAX_CLIENTS)] = (
        Field(
            default="auto",
            description="largest number of vectorized clients, which train together in stacked "
            "tensors; auto: by the kind of model and of device; off: each client alone. It changes "
            "the last bits of a model, never an ε",
        )
    )

    @field_validator("augmentations", mode="before")
    @classmethod
    def _are_changes(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(
                f"must be a list of changes of a view, got {value}; the number of views of an "
                "example is local.augmentation_multiplicity"
            )
        return value

    def __hash__(self) -> int:
        """Return a hash of the values as JSON, since lists have no hash."""
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
        """Return the local learning rate of a round; it depends on no client's data.

        Args:
            round_number: the round ≥ 1.
        """
        lr = self.optimizer.lr
        return lr if self.lr_schedule is None else self.lr_schedule.rate(lr, round_number)

    def optimizer_in(self, round_number: int) -> OptimizerSettings:
        """Return the optimizer settings of a round, with the round's learning rate.

        Args:
            round_number: the round ≥ 1.
        """
        if self.lr_schedule is None:
            return self.optimizer
        return self.optimizer.model_copy(update={"lr": self.learning_rate(round_number)})

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer; for SGD it also says whether momentum or weight decay is used."""
        settings = self.optimizer
        if isinstance(settings, SgdSettings) and (settings.momentum or settings.weight_decay):
            return "sgd with momentum or weight decay"
        return settings.name

    def without_schedule(self) -> Self:
        """Return the settings with a constant learning rate, which a privacy audit needs."""
        return self.model_copy(update={"lr_schedule": None})

    @property
    def gradient_facts(self) -> ZerothOrderSettings | BackwardPasses:
        """Public properties of the gradient computation: by backward passes or zeroth-order."""
        return BackwardPasses() if self.gradient == "backward" else self.gradient

    @property
    def zeroth_order(self) -> ZerothOrderSettings | None:
        """Settings of zeroth-order steps; None if steps use backward passes."""
        return None if self.gradient == "backward" else self.gradient

    @property
    def given_steps(self) -> int:
        """Optimizer steps per round as set by `steps`, the same for all clients.

        Raises:
            ValueError: `epochs` is set instead, so the number of steps differs between clients.
        """
        if self.steps is None:
            raise ValueError(
                f"local.epochs = {self.epochs} gives clients different numbers of steps; set "
                "local.steps instead"
            )
        return self.steps

    def steps_at_rate(self, rate: float) -> int:
        """Return a client's optimizer steps per round, from `steps` or from `epochs`.

        Args:
            rate: the client's sampling rate, in (0, 1].

        Raises:
            ValueError: the epochs need more steps than the limit.
        """
        if self.steps is not None:
            return self.steps
        epochs = self.epochs or 0.0
        steps = max(1, math.ceil(epochs / rate * (1.0 - _ROUNDING)))
        if steps > MAX_STEPS:
            raise ValueError(
                f"local.epochs = {epochs:g} at a sampling rate of {rate:.3g} are {steps:,} steps a "
                f"round, and {MAX_STEPS:,} is the most; use fewer epochs, or a larger batch_size"
            )
        return steps

    @property
    def views(self) -> Sequence[ViewSettings] | None:
        """Settings of the random changes of an example; None if examples stay unchanged."""
        if self.augmentations is not None:
            return self.augmentations
        return DEFAULT_VIEWS if self.augmentation_multiplicity > 1 else None

    def with_equal_views(self) -> Self:
        """Return the settings without random changes: each view of an example equals the example.

        The number of views stays the same. Checks of the privacy mechanism use these settings to
        measure what one example contributes.
        """
        return self if self.views is None else self.model_copy(update={"augmentations": []})

    def expected_batch(self, num_examples: int) -> int:
        """Return the expected batch size of a client's step.

        Args:
            num_examples: number of the client's examples.
        """
        return num_examples if self.batch_size == "full" else min(self.batch_size, num_examples)
