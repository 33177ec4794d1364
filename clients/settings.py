"""Settings of local training and its privacy: the sections `local:` and `privacy:`.

`PrivacySettings` sets ε; `LocalSettings` changes it through the sampling rate and the number of
steps. Nothing else in an experiment changes ε.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.clients.augmentation.settings import DEFAULT_VIEWS, MAX_VIEWS, ViewSettings
from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings
from fedsim.clients.correlated_noise.settings import (
    NoiseCorrelationSettings,
    check_correlation_needs,
)
from fedsim.clients.group_settings import GroupSettings, check_groups, has_all_noise
from fedsim.clients.lr_schedule import LrSchedule
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION, ReleaseKind, kind_of
from fedsim.clients.sampling.schemes import POISSON, SAMPLING_SCHEMES, SamplingName
from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES, MAX_RENYI_ORDER, MAX_STEPS
from fedsim.core.settings import Probability, Settings, Share
from fedsim.zeroth_order.settings import ZerothOrderSettings

_ROUNDING = 1e-9  # relative: what rounding may add to a whole number of steps

if TYPE_CHECKING:
    from fedsim.accountant.accountants import AccountantChoice


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

    def without_schedule(self) -> Self:
        """Return the settings with one learning rate in all rounds, as an audit repeats rounds."""
        return self.model_copy(update={"lr_schedule": None})

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


class BoundedExamplesSettings(Settings):
    """`privacy.mechanism` where examples themselves are bounded, and no gradient is clipped."""

    name: Literal["output_perturbation", "input_perturbation"] = Field(
        description="where the noise goes; see `privacy.mechanism`"
    )
    max_feature_norm: float = Field(
        gt=0,
        description="L2 bound R of the features of an example, scaled down to it where longer",
    )
    max_target_norm: float | None = Field(
        default=None,
        gt=0,
        description="L2 bound Y of the target of an example under the loss mse",
    )


class PrivacySettings(Settings):
    """`privacy:` in an experiment file: whom it trusts, what it protects, and how."""

    trust: Literal["local", "distributed", "central"] = Field(
        default="local",
        description="who may see values with too little noise; local: nobody, each client adds all "
        "of its noise; distributed: nobody, clients add shares and only sums are opened; central: "
        "the server, which adds the noise",
    )
    unit: Literal["example", "client"] = Field(
        default="example",
        description="what one ε protects: one example of a client, or everything that it has",
    )
    colluding_clients: Annotated[int, Field(ge=0, lt=MAX_CLIENTS)] | None = Field(
        default=None,
        description="with distributed trust: clients of a sum that may collude with whoever sees "
        "it, or add no noise; null: 1, since every client sees the models and knows its own noise",
    )
    fallback_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="with distributed trust: largest ε of a client against whoever sees its own "
        "upload, which raises its share of the noise; null: no bound",
    )
    target_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="budget ε, never exceeded; without noise_multiplier the noise is calibrated "
        "to spend it over the whole planned run",
    )
    noise_multiplier: float | None = Field(
        default=None,
        ge=0,
        description="noise standard deviation divided by max_grad_norm or max_update_norm",
    )
    delta: Probability | Literal["auto"] = Field(
        description="should be well below 1 / (a client's examples), or 1 / (number of clients) "
        "with unit: client; auto: the largest power of ten that is at most a tenth of it"
    )
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="L2 bound C of one example's gradient; for unit: example"
    )
    max_update_norm: float | None = Field(
        default=None, gt=0, description="L2 bound S of a client's whole update; for unit: client"
    )
    mechanism: Literal["gradient_perturbation"] | BoundedExamplesSettings = Field(
        default=GRADIENT_PERTURBATION,
        description="where the noise goes; gradient_perturbation: on clipped gradients, or on a "
        "whole update with unit: client; {name: output_perturbation, max_feature_norm: 1}: on a "
        "linear model after training without noise, once a round; input_perturbation likewise: on "
        "every example, once before the first round, so that rounds cost nothing more",
    )
    clipping: Literal["flat", "per_layer", "automatic", "adaptive"] = Field(
        default="flat",
        description="one bound for the whole gradient, one for each layer, gradients normalised, "
        "or one bound that each client learns, from max_grad_norm on, by a noisy count; with unit: "
        "client one bound for the whole update, flat, or learnt by the server (adaptive)",
    )
    groups: dict[str, GroupSettings] = Field(
        default={},
        description="groups of parameters by patterns of their names, such as conv.*, each with a "
        "bound of its own; every trained parameter is in exactly one, and * is all others",
    )
    clip_rule: Literal["equal", "by_dimension"] | None = Field(
        default=None, description="how per_layer divides max_grad_norm among layers; null: equal"
    )
    noise_allocation: Literal["uniform", "proportional", "optimal"] | None = Field(
        default=None, description="how per_layer divides the noise among layers; null: uniform"
    )
    clip_quantile: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of gradients that adaptive clipping leaves whole; null: 0.5",
    )
    clip_learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="how fast adaptive clipping learns, in e-folds of its bound; null: 0.2",
    )
    clip_count_noise: float | None = Field(
        default=None,
        gt=0,
        description="noise standard deviation on the count that adaptive clipping learns from; "
        "null: expected lot / 20, or with unit: client clients of a round / 20",
    )
    sampling_rate: Share | None = Field(
        default=None,
        description="expected share of a client's examples in a lot, the same for clients of all "
        "sizes; null: local.batch_size / declared client size",
    )
    sampling: SamplingName = Field(
        default=POISSON.name,
        description="how lots are drawn, and what is charged for them; "
        f"{POISSON.name}: {POISSON.description}",
    )
    noise: Literal["seeded", "secure"] = Field(
        default="seeded",
        description="seeded: reproducible by anyone who knows the seed; secure: lots and noise "
        "from the operating system, so that no run can be repeated",
    )
    noise_correlation: NoiseCorrelationSettings = Field(
        default="none",
        description="correlation of noise from step to step, which lowers the error of sums over "
        "many steps; none: independent noise",
    )
    adjacency: Literal["zero_out", "add_remove", "replace_one"] = Field(
        default="zero_out",
        description="neighbouring datasets; zero_out and replace_one treat client sizes as public",
    )
    declared_examples: int | None = Field(
        default=None,
        ge=1,
        le=MAX_EXAMPLES,
        description="public client size that sets the sampling rate; required by add_remove",
    )
    accountant: Literal["pld", "rdp", "moments"] = Field(
        default="pld",
        description="bound that is reported and calibrated to: pld, tight; rdp; or moments, the "
        "loose one of Abadi et al. 2016, for comparison",
    )
    orders: (
        Annotated[list[Annotated[float, Field(gt=1, le=MAX_RENYI_ORDER)]], Field(min_length=1)]
        | None
    ) = Field(
        default=None,
        description="Rényi orders of accountant rdp, each above 1, in place of its own: more can "
        "only lower ε; null: 1.05 to 1024",
    )
    on_exhausted: Literal["refuse", "withdraw", "stop"] = Field(
        default="refuse",
        description="refuse: a plan that exceeds a client's target_epsilon does not start; "
        "withdraw: a client leaves when its budget affords no further step; stop: the run ends "
        "then",
    )
    clients: dict[str, ClientPrivacySettings] = Field(
        default={},
        description="settings of single clients by number, and of groups by any other name",
    )

    @property
    def accounting(self) -> "AccountantChoice":
        """The accountant that computes ε, at `orders` where they are given."""
        # Imported here: numpy and scipy are slow to import, and reading a file needs neither.
        from fedsim.accountant.accountants import choose_accountant

        return choose_accountant(self.accountant, self.orders)

    @property
    def clip_norm(self) -> float:
        """L2 bound of what one unit contributes: `max_grad_norm` or `max_update_norm`.

        Raises:
            ValueError: the key of the unit is missing, which the settings refuse, or nothing is
                clipped.
        """
        if self.groups:
            return math.hypot(*(one.max_grad_norm for one in self.groups.values()))
        bound = getattr(self, self.release_kind.bound, None)
        if bound is None:
            raise ValueError(f"unit {self.unit} has no bound")
        return bound

    @property
    def release_kind(self) -> ReleaseKind:
        """The kind of a client's releases, where it trains and does not vote."""
        return kind_of(unit=self.unit, mechanism=self.mechanism_name, votes=False)

    @property
    def mechanism_name(self) -> str:
        """The name of `mechanism`, with or without settings."""
        return self.mechanism if isinstance(self.mechanism, str) else self.mechanism.name

    @property
    def example_bound(self) -> float | None:
        """L2 bound of an example's whole gradient; None where no gradient is clipped by itself."""
        return self.clip_norm if self.groups else self.max_grad_norm

    @property
    def gives_noise(self) -> bool:
        """Whether the settings give the noise of a step, so that none is calibrated."""
        return self.noise_multiplier is not None or has_all_noise(self.groups)

    @property
    def recorded_clipping(self) -> str:
        """Name of the clipping in `privacy.json`: with groups, `groups` or `adaptive_groups`."""
        if not self.groups:
            return self.clipping
        return "adaptive_groups" if self.clipping == "adaptive" else "groups"

    @property
    def counts_in_sums(self) -> bool:
        """Whether what adaptive clipping learns from is a part of a noisy sum."""
        return self.release_kind.protects_client and self.trust != "local"

    @property
    def colluders(self) -> int:
        """Clients of a sum that may collude: `colluding_clients`, or 1."""
        return 1 if self.colluding_clients is None else self.colluding_clients

    def with_own(self, own: OwnPrivacySettings) -> "PrivacySettings":
        """Return the settings with those of one client in place of everybody's."""
        return self.model_copy(update={name: value for name, value in own if value is not None})

    @model_validator(mode="after")
    def _whose_settings(self) -> Self:
        for name, entry in self.clients.items():
            entry.check(name)
        return self

    @model_validator(mode="after")
    def _bound_of_the_unit(self) -> Self:
        kind = self.release_kind
        for key in ("max_grad_norm", "max_update_norm", "groups"):
            bounds = key == kind.bound or (key == "groups" and kind.draws_lots)
            if getattr(self, key) and not bounds:
                use = f"use {kind.bound}" if kind.bound else f"leave {key} out"
                raise ValueError(
                    f"{key} bounds nothing with unit: {self.unit} and mechanism: "
                    f"{self.mechanism_name}; {use}"
                )
        if kind.draws_lots and self.max_grad_norm is None and not self.groups:
            raise ValueError(
                "unit: example needs max_grad_norm, the L2 bound of what one example contributes"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_groups(self) -> Self:
        if not self.groups:
            return self
        keys = ("max_grad_norm", "clipping", "noise_correlation", "noise_multiplier")
        check_groups(self.groups, {key: getattr(self, key) for key in keys})
        for name, entry in self.clients.items():
            for key in ("max_grad_norm", "noise_multiplier"):
                given = getattr(entry, key) is not None or key in entry.columns
                if given and (key == "max_grad_norm" or has_all_noise(self.groups)):
                    raise ValueError(
                        f"clients: {name!r} has a {key}, and that of every group is fixed by "
                        f"privacy.groups for all clients; remove {key}"
                    )
        return self

    @model_validator(mode="after")
    def _keys_of_distributed_trust(self) -> Self:
        for key in ("colluding_clients", "fallback_epsilon"):
            if getattr(self, key) is not None and self.trust != "distributed":
                raise ValueError(f"{key} belongs to trust: distributed, got trust: {self.trust}")
        return self

    @model_validator(mode="after")
    def _source_of_noise(self) -> Self:
        if self.target_epsilon is None and not self.gives_noise:
            raise ValueError(
                "needs target_epsilon, noise_multiplier or both, got neither; target_epsilon "
                "alone calibrates the noise for you"
            )
        return self

    @model_validator(mode="after")
    def _budget_to_exhaust(self) -> Self:
        targets = [self.target_epsilon, *(one.target_epsilon for one in self.clients.values())]
        tables = any("target_epsilon" in one.columns for one in self.clients.values())
        if self.on_exhausted != "refuse" and not tables and targets == [None] * len(targets):
            raise ValueError(
                f"on_exhausted: {self.on_exhausted} needs a budget: give target_epsilon, for all "
                "or for some clients"
            )
        return self

    @model_validator(mode="after")
    def _orders_of_the_accountant(self) -> Self:
        if self.orders is not None and self.accountant != "rdp":
            raise ValueError(
                f"orders belong to accountant: rdp, got accountant: {self.accountant}; leave "
                "orders out, or set accountant: rdp"
            )
        return self

    @model_validator(mode="after")
    def _public_client_size(self) -> Self:
        if self.release_kind.protects_client:
            return self  # no size enters, declared or not
        if self.adjacency == "add_remove" and self.declared_examples is None:
            raise ValueError(
                "adjacency add_remove keeps client sizes private, so the sampling rate cannot come "
                "from them: set declared_examples to a public number, or use adjacency zero_out"
            )
        if self.adjacency != "add_remove" and self.declared_examples is not None:
            raise ValueError(
                f"declared_examples belongs to adjacency add_remove; under {self.adjacency} the "
                "client sizes are public and are used as they are"
            )
        return self

    @model_validator(mode="after")
    def _sampling_with_a_guarantee(self) -> Self:
        scheme = SAMPLING_SCHEMES[self.sampling]
        if self.adjacency not in scheme.adjacencies:
            raise ValueError(scheme.refusal(self.adjacency))
        return self

    @model_validator(mode="after")
    def _correlation_with_a_guarantee(self) -> Self:
        if self.noise_correlation != "none":
            cyclic = [scheme.name for scheme in SAMPLING_SCHEMES.values() if scheme.is_cyclic]
            check_correlation_needs(
                {
                    "sampling": (self.sampling, cyclic),
                    "noise": (self.noise, ["seeded"]),
                    "adjacency": (self.adjacency, ["zero_out"]),
                    "clipping": (self.clipping, ["flat", "per_layer", "automatic"]),
                    "on_exhausted": (self.on_exhausted, ["refuse"]),
                }
            )
        return self

    @model_validator(mode="after")
    def _keys_of_clippings(self) -> Self:
        for clipping, keys in _KEYS_OF_CLIPPINGS.items():
            for key in keys:
                if getattr(self, key) is not None and self.clipping != clipping:
                    raise ValueError(
                        f"{key} belongs to clipping {clipping}, got clipping {self.clipping}; "
                        f"leave {key} out, or set clipping: {clipping}"
                    )
        return self


def recorded_mechanism(privacy: PrivacySettings) -> dict[str, object] | None:
    """Return `mechanism` as `privacy.json` records it; None for noise on gradients or updates."""
    named = privacy.mechanism
    return None if isinstance(named, str) else named.model_dump(mode="json")


def recorded_correlation(privacy: PrivacySettings) -> dict[str, object] | None:
    """Return the correlation of noise as `privacy.json` records it; None for independent noise."""
    correlation = privacy.noise_correlation
    return None if correlation == "none" else correlation.model_dump(mode="json")


_KEYS_OF_CLIPPINGS = {
    "per_layer": ("clip_rule", "noise_allocation"),
    "adaptive": ("clip_quantile", "clip_learning_rate", "clip_count_noise"),
}
