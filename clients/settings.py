"""What a client is told: local training and its privacy.

`PrivacySettings` changes ε; `LocalSettings` changes ε through the sampling rate and the number of
steps; nothing else in an experiment does.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.server.settings import Settings

Probability = Annotated[float, Field(gt=0, lt=1)]


class SgdSettings(Settings):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    lr: float = Field(gt=0, description="learning rate")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum factor")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")


class AdamSettings(Settings):
    """Adam, or AdamW with decoupled weight decay."""

    name: Literal["adam", "adamw"]
    lr: float = Field(gt=0, description="learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty")


OptimizerSettings = Annotated[SgdSettings | AdamSettings, Field(discriminator="name")]


class LocalSettings(Settings):
    """`local:` in an experiment file: what one client does in one round."""

    steps: int = Field(ge=1, description="optimizer steps per round")
    batch_size: int = Field(
        ge=1,
        description="expected batch (lot); with privacy the sampling rate is batch_size / "
        "declared client size",
    )
    optimizer: OptimizerSettings = Field(
        default=SgdSettings(name="sgd", lr=0.1),
        description="made anew each round, as in federated averaging",
    )


class ClientPrivacySettings(Settings):
    """What one client has of its own in `privacy.clients`; the rest is everybody's."""

    target_epsilon: float | None = Field(default=None, gt=0, description="the client's own ε")
    noise_multiplier: float | None = Field(
        default=None, ge=0, description="the client's own noise, instead of a target"
    )
    delta: Probability | None = Field(default=None, description="the client's own δ")
    max_grad_norm: float | None = Field(default=None, gt=0, description="the client's own bound C")

    @model_validator(mode="after")
    def _at_most_one_source_of_noise(self) -> Self:
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                "takes target_epsilon or noise_multiplier, got both; "
                "target_epsilon calibrates the noise for you"
            )
        return self


class PrivacySettings(Settings):
    """`privacy:` in an experiment file: example-level DP-SGD in every client."""

    target_epsilon: float | None = Field(
        default=None, gt=0, description="noise is calibrated to this ε over the whole planned run"
    )
    noise_multiplier: float | None = Field(
        default=None, ge=0, description="noise standard deviation divided by max_grad_norm"
    )
    delta: Probability = Field(description="should be well below 1 / (a client's examples)")
    max_grad_norm: float = Field(gt=0, description="L2 bound C of one example's gradient")
    clipping: Literal["flat", "per_layer", "automatic"] = Field(
        default="flat",
        description="one bound for the whole gradient, one for each layer, or gradients normalised",
    )
    clip_rule: Literal["equal", "by_dimension"] | None = Field(
        default=None, description="how per_layer divides max_grad_norm among layers; null: equal"
    )
    noise_allocation: Literal["uniform", "proportional", "optimal"] | None = Field(
        default=None, description="how per_layer divides the noise among layers; null: uniform"
    )
    sampling: Literal["poisson", "fixed_size", "shuffle", "balls_and_bins"] = Field(
        default="poisson",
        description="how lots are drawn, and what is charged for them; poisson: each example "
        "enters each lot independently",
    )
    noise: Literal["seeded", "secure"] = Field(
        default="seeded",
        description="seeded: reproducible by whoever knows the seed; secure: lots and noise from "
        "the operating system, so that no run can be repeated",
    )
    adjacency: Literal["zero_out", "add_remove", "replace_one"] = Field(
        default="zero_out",
        description="neighbouring datasets; zero_out and replace_one treat client sizes as public",
    )
    declared_examples: int | None = Field(
        default=None,
        ge=1,
        description="public client size that sets the sampling rate; required by add_remove",
    )
    accountant: Literal["pld", "rdp"] = Field(
        default="pld", description="bound that is reported and calibrated to"
    )
    clients: dict[str, ClientPrivacySettings] = Field(
        default={}, description="settings of single clients, by client number"
    )

    def for_client(self, client: int) -> "PrivacySettings":
        """Return the settings of one client: its own where it has them, else everybody's."""
        own = self.clients.get(str(client))
        if own is None:
            return self
        update = {name: value for name, value in own if value is not None}
        if own.target_epsilon is not None:
            update["noise_multiplier"] = None
        if own.noise_multiplier is not None:
            update["target_epsilon"] = None
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _client_numbers(self) -> Self:
        for name in self.clients:
            if not name.isdecimal() or name != str(int(name)):
                raise ValueError(
                    f"clients: {name!r} is not a client number; write them as '0', '1', ..."
                )
        return self

    @model_validator(mode="after")
    def _one_source_of_noise(self) -> Self:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "both" if self.target_epsilon is not None else "neither"
            raise ValueError(
                f"needs exactly one of target_epsilon and noise_multiplier, got {given}; "
                "target_epsilon calibrates the noise for you"
            )
        return self

    @model_validator(mode="after")
    def _public_client_size(self) -> Self:
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
        if self.sampling == "fixed_size" and self.adjacency != "replace_one":
            raise ValueError(
                "sampling fixed_size is accounted for under adjacency replace_one only, because "
                "another example fills the place of a missing one: set adjacency: replace_one, or "
                "sampling: poisson"
            )
        if self.sampling == "shuffle" and self.adjacency == "add_remove":
            raise ValueError(
                "sampling shuffle has no guarantee under adjacency add_remove, because one more "
                "example moves others to another lot: set adjacency: zero_out or replace_one, or "
                "sampling: poisson or balls_and_bins"
            )
        return self

    @model_validator(mode="after")
    def _secret_lots(self) -> Self:
        if self.noise == "secure" and self.sampling == "balls_and_bins":
            raise ValueError(
                "noise secure needs lots that nobody can predict, but balls_and_bins goes on over "
                "rounds and so takes them from the seed: set sampling: poisson, or noise: seeded"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_layers(self) -> Self:
        for key in ("clip_rule", "noise_allocation"):
            if getattr(self, key) is not None and self.clipping != "per_layer":
                raise ValueError(
                    f"{key} belongs to clipping per_layer, got clipping {self.clipping}; leave "
                    f"{key} out, or set clipping: per_layer"
                )
        return self
