"""Settings of DP-SGD: `privacy.sampling`, `privacy.clipping` and `privacy.noise_correlation`.

Every group of parameters has a bound C_m of its own. Its noise multiplier z_m is given, or follows
from the noise of the whole step: groups without one share what is left, in the ratio of their
`relative_noise`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES, SamplingName, SamplingScheme
from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.core.settings import Choice, Settings, Share


class SamplingSettings(Settings):
    """How lots are drawn from a client's examples."""

    name: SamplingName = Field(description="which sampling; see `privacy.sampling`")
    rate: Share | None = Field(
        default=None,
        description="expected share of a client's examples in a lot, the same for clients of all "
        "sizes; null: local.batch_size / declared client size",
    )

    @property
    def scheme(self) -> SamplingScheme:
        """What is known of the sampling without numbers."""
        return SAMPLING_SCHEMES[self.name]


class GroupSettings(Settings):
    """One group of parameters, named by a pattern."""

    max_grad_norm: float = Field(
        gt=0, description="L2 bound C_m of one example's gradient in the group"
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="noise standard deviation in the group divided by its max_grad_norm; null: it "
        "follows from the noise of the whole step",
    )
    relative_noise: float | None = Field(
        default=None,
        gt=0,
        description="noise multiplier over that of other groups without one; null: 1",
    )

    @model_validator(mode="after")
    def _given_or_relative(self) -> Self:
        if self.noise_multiplier is not None and self.relative_noise is not None:
            raise ValueError(
                "the group has a noise_multiplier, so nothing of its noise is relative; remove "
                "relative_noise"
            )
        return self


Groups = Mapping[str, GroupSettings]


_OwnGroups = Annotated[
    dict[str, GroupSettings],
    Field(
        description="groups of parameters by patterns of their names, such as conv.*, each with a "
        "bound of its own; every trained parameter is in exactly one, and * is all others",
    ),
]
_NO_GROUPS: Groups = MappingProxyType({})


class FlatClippingSettings(Settings):
    """One bound for the whole gradient, for each group, or for the whole update of a client."""

    name: Literal["flat"] = Field(description="which clipping; see `privacy.clipping`")
    groups: _OwnGroups = Field(default={})


class AutomaticClippingSettings(Settings):
    """Gradients are normalised."""

    name: Literal["automatic"] = Field(description="which clipping; see `privacy.clipping`")
    groups: ClassVar[Groups] = _NO_GROUPS


class LayerClippingSettings(Settings):
    """A bound for each layer."""

    name: Literal["per_layer"] = Field(description="which clipping; see `privacy.clipping`")
    rule: Literal["equal", "by_dimension"] = Field(
        default="equal", description="how max_grad_norm is divided among layers"
    )
    noise_allocation: Literal["uniform", "proportional", "optimal"] = Field(
        default="uniform", description="how the noise is divided among layers"
    )
    groups: ClassVar[Groups] = _NO_GROUPS


class AdaptiveClippingSettings(Settings):
    """A bound that follows a quantile of the norms, learnt from a noisy count."""

    name: Literal["adaptive"] = Field(description="which clipping; see `privacy.clipping`")
    quantile: float = Field(
        default=0.5, ge=0, le=1, description="share of gradients, or updates, that stay whole"
    )
    learning_rate: float = Field(
        default=0.2, gt=0, description="how fast the bound follows, in e-folds"
    )
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="noise standard deviation on the count; null: expected lot / 20, or with unit: "
        "client clients of a round / 20",
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
    """Whether every group has a noise multiplier of its own, so that nothing is left to scale."""
    return bool(groups) and all(one.noise_multiplier is not None for one in groups.values())


def check_groups(groups: Groups, given: Mapping[str, object]) -> None:
    """Check the groups against the other keys of the `privacy` section.

    Args:
        groups: by pattern.
        given: the other keys that matter, by name; their values.

    Raises:
        ValueError: two keys contradict each other; the message names both and the fix.
    """
    if given["max_grad_norm"] is not None:
        raise ValueError(
            "groups have bounds of their own, and the bound of the whole gradient follows from "
            "them; remove max_grad_norm"
        )
    if given["noise_correlation"] != "none":
        raise ValueError(
            "groups have no proof for correlated noise; remove groups, or use noise_correlation: "
            "none"
        )
    if given["noise_multiplier"] == 0.0 and any(one.noise_multiplier for one in groups.values()):
        raise ValueError(
            "noise_multiplier: 0 is no privacy, and a group has noise; remove the noise_multiplier "
            "of every group, or that of privacy"
        )
    if has_all_noise(groups) and given["noise_multiplier"] is not None:
        raise ValueError(
            "every group has a noise_multiplier, and together they are that of the whole step; "
            "remove privacy.noise_multiplier, or that of one group"
        )


_REASONS = {
    "sampling": "an example's lots must be at least `bands` steps apart",
    "noise": "the noise of earlier steps is computed again from the seed, and secure noise "
    "cannot be",
    "adjacency": "its guarantee is proven for an example that is zeroed",
    "clipping": "all steps are charged with one clipping bound",
    "on_exhausted": "the whole run is one event, charged before its first step",
}


class ToeplitzSettings(Settings):
    """Banded Toeplitz square root of the prefix sums."""

    name: Literal["toeplitz"] = Field(description="the kind of correlation")
    bands: int = Field(
        ge=2,
        le=MAX_NOISE_BANDS,
        description="steps over which a step's noise is taken back, its own included; an example's "
        "lots are at least as many steps apart",
    )


NoiseCorrelationSettings = Literal["none"] | ToeplitzSettings


def check_correlation_needs(given: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Check that the other settings allow correlated noise.

    Args:
        given: of each key, its value and the values that are allowed.

    Raises:
        ValueError: a value is not among them.
    """
    for key, (value, allowed) in given.items():
        if value not in allowed:
            raise ValueError(
                f"noise_correlation has no guarantee with {key}: {value}, because {_REASONS[key]}: "
                f"set {key}: {' or '.join(allowed)}, or noise_correlation: none"
            )
