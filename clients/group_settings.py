"""Settings of groups of parameters: `privacy.groups`, a pattern of names for each.

Every group has a bound C_m of its own. Its noise multiplier z_m is given, or follows from the noise
of the whole step: groups without one share what is left, in the ratio of their `relative_noise`.
"""

from collections.abc import Mapping

from pydantic import Field

from fedsim.core.settings import Settings

GROUP_CLIPPINGS = ("flat", "adaptive")


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


Groups = Mapping[str, GroupSettings]


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
    for pattern, one in groups.items():
        if one.noise_multiplier is not None and one.relative_noise is not None:
            raise ValueError(
                f"groups: {pattern!r} has a noise_multiplier, so nothing of its noise is relative; "
                "remove relative_noise"
            )
    if given["max_grad_norm"] is not None:
        raise ValueError(
            "groups have bounds of their own, and the bound of the whole gradient follows from "
            "them; remove max_grad_norm"
        )
    if given["clipping"] not in GROUP_CLIPPINGS:
        raise ValueError(
            f"groups are clipped each to its own bound, and clipping {given['clipping']} has other "
            f"bounds; use clipping: {' or '.join(GROUP_CLIPPINGS)}"
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
