"""Settings of DP-SGD: `privacy.sampling` and `privacy.clipping`.

Each group of parameters may have a separate clipping norm and noise multiplier. If only some groups
have a noise multiplier, the noise multipliers of the others are computed from that of the whole
step, in the ratio of their `relative_noise`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsim.clients.sampling.schemes import SamplingName
from fedsim.core.settings import Choice, Settings, Share


class SamplingSettings(Settings):
    """Settings of how batches are drawn from a client's examples."""

    name: SamplingName = Field(description="which sampling; see `privacy.sampling`")
    rate: Share | None = Field(
        default=None,
        description="expected share of a client's examples in a batch, the same for clients of all "
        "sizes; null stands for local.batch_size / declared client size",
    )


class GroupSettings(Settings):
    """Settings of clip norm and noise of one group of parameters, which a name pattern selects."""

    max_grad_norm: float = Field(
        gt=0, description="clip norm C_m of a per-example gradient in the group"
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="noise standard deviation in the group divided by its max_grad_norm; with null "
        "it follows from the noise of the whole step",
    )
    relative_noise: float | None = Field(
        default=None,
        gt=0,
        description="noise multiplier relative to the other groups without a noise_multiplier; "
        "null stands for 1",
    )

    @model_validator(mode="after")
    def _given_or_relative(self) -> Self:
        if self.noise_multiplier is not None and self.relative_noise is not None:
            raise ValueError(
                "the group has a noise_multiplier, so relative_noise has no effect; remove "
                "relative_noise"
            )
        return self


Groups = Mapping[str, GroupSettings]


_OwnGroups = Annotated[
    dict[str, GroupSettings],
    Field(
        description="groups of parameters by patterns of their names, such as conv.*, each with "
        "its clip norm; every trained parameter is in exactly one group, and * is all others",
    ),
]
_NO_GROUPS: Groups = MappingProxyType({})


class FlatClippingSettings(Settings):
    """Settings of clipping to fixed norms: of the gradient, of each group, or of a whole update."""

    name: Literal["flat"] = Field(description="which clipping; see `privacy.clipping`")
    groups: _OwnGroups = Field(default={})


class AutomaticClippingSettings(Settings):
    """Settings of automatic clipping, which normalises each per-example gradient."""

    name: Literal["automatic"] = Field(description="which clipping; see `privacy.clipping`")
    groups: ClassVar[Groups] = _NO_GROUPS


class LayerClippingSettings(Settings):
    """Settings of clipping with a separate clip norm for each layer."""

    name: Literal["per_layer"] = Field(description="which clipping; see `privacy.clipping`")
    rule: Literal["equal", "by_dimension"] = Field(
        default="equal", description="how max_grad_norm is divided among layers"
    )
    noise_allocation: Literal["uniform", "proportional", "optimal"] = Field(
        default="uniform", description="how the noise is divided among layers"
    )
    groups: ClassVar[Groups] = _NO_GROUPS


class AdaptiveClippingSettings(Settings):
    """Settings of adaptive clipping: a noisy count moves the clip norm to a quantile of norms."""

    name: Literal["adaptive"] = Field(description="which clipping; see `privacy.clipping`")
    quantile: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="target share of gradients, or updates, that are not clipped",
    )
    learning_rate: float = Field(
        default=0.2,
        gt=0,
        description="learning rate of the clip norm, in its logarithm",
    )
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="noise standard deviation on the count; null stands for expected batch size / "
        "20, or with unit: client for clients of a round / 20",
    )
    groups: _OwnGroups = Field(default={})


ClippingSettings = Annotated[
    FlatClippingSettings
    | AutomaticClippingSettings
    | LayerClippingSettings
    | AdaptiveClippingSettings,
    Choice(),
]


def has_all_noise(groups: Groups) -> bool:
    """Whether the settings give each of the groups (at least one) a noise multiplier."""
    return all(group.noise_multiplier is not None for group in groups.values())


def check_groups(
    groups: Groups, max_grad_norm: float | None, noise_multiplier: float | None, correlation: str
) -> None:
    """Check that the parameter groups do not contradict the other keys of the `privacy` section.

    Args:
        groups: the groups of `privacy.clipping.groups`, by pattern.
        max_grad_norm: value of `max_grad_norm`.
        noise_multiplier: value of `noise_multiplier`.
        correlation: name of `noise_correlation`.

    Raises:
        ValueError: two keys contradict each other; the message names both and the fix.
    """
    if max_grad_norm is not None:
        raise ValueError(
            "every group has a max_grad_norm, and the bound of the whole gradient follows from "
            "these; remove max_grad_norm outside clipping.groups"
        )
    if correlation != "none":
        raise ValueError(
            "correlated noise has no guarantee with groups; remove groups, or set "
            "noise_correlation: none"
        )
    if noise_multiplier == 0.0 and any(group.noise_multiplier for group in groups.values()):
        raise ValueError(
            "noise_multiplier: 0 means no privacy, but a group has a noise_multiplier; remove the "
            "noise_multiplier of every group, or privacy.noise_multiplier"
        )
    if has_all_noise(groups) and noise_multiplier is not None:
        raise ValueError(
            "every group has a noise_multiplier, and that of the whole step follows from these; "
            "remove privacy.noise_multiplier, or the noise_multiplier of one group"
        )


_REASONS = {
    "sampling": "two uses of an example must be at least `bands` steps apart",
    "noise": "the noise of earlier steps is computed again from the seed, and secure noise "
    "cannot be",
    "adjacency": "its guarantee is proven for no other adjacency",
    "clipping": "all steps are charged with one fixed clip norm",
    "on_exhausted": "the whole run is one event, charged before its first step",
}


def check_correlation_needs(given: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Check that the other settings allow correlated noise.

    Args:
        given: for each key, its value and the values that correlated noise allows.

    Raises:
        ValueError: a value is not allowed.
    """
    for key, (value, allowed) in given.items():
        if value not in allowed:
            raise ValueError(
                f"noise_correlation has no guarantee with {key}: {value}, because {_REASONS[key]}: "
                f"set {key}: {' or '.join(allowed)}, or noise_correlation: none"
            )
