"""Clipping and noise of a step of DP-SGD, as the settings of a client give them."""

from dataclasses import replace

from fedsim.clients.clipping.adaptive import LOT_OVER_COUNT_NOISE, AdaptiveClipping
from fedsim.clients.clipping.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GroupClipping,
)
from fedsim.clients.clipping.patterns import PatternClipping
from fedsim.clients.dp_sgd.noise_allocation import ChosenNoise
from fedsim.clients.group_settings import has_all_noise
from fedsim.clients.settings import PrivacySettings


def chosen_noise(privacy: PrivacySettings) -> ChosenNoise:
    """Return how the noise of a step is divided among the groups of `privacy.groups`."""
    groups = privacy.groups.values()
    return ChosenNoise(
        given=tuple(one.noise_multiplier for one in groups),
        relative=tuple(one.relative_noise or 1.0 for one in groups),
    )


def given_noise(privacy: PrivacySettings, expected_lot: float) -> float | None:
    """Return the noise multiplier of a whole step that the settings give; None: calibrate it.

    Args:
        privacy: the client's settings.
        expected_lot: its expected number of examples in a step.
    """
    if not has_all_noise(privacy.groups):
        return privacy.noise_multiplier
    together = chosen_noise(privacy).together
    return None if together is None else _groups(privacy, expected_lot).whole_noise(together)


def _groups(privacy: PrivacySettings, expected_lot: float) -> PatternClipping:
    patterns = tuple(privacy.groups)
    clipping = PatternClipping(
        patterns, tuple(privacy.groups[name].max_grad_norm for name in patterns)
    )
    if privacy.clipping != "adaptive":
        return clipping
    return replace(
        clipping,
        **{"count_noise": expected_lot / LOT_OVER_COUNT_NOISE, **_given_adaptation(privacy)},
    )


def clipping_of(privacy: PrivacySettings, expected_lot: float) -> Clipping:
    """Return the clipping of a step.

    Args:
        privacy: the client's settings.
        expected_lot: its expected number of examples in a step.
    """
    if privacy.groups:
        return _groups(privacy, expected_lot)
    match privacy.clipping:
        case "adaptive":
            return _adaptive(privacy, expected_lot)
        case "flat":
            return FlatClipping(privacy.clip_norm)
        case "automatic":
            return AutomaticClipping(privacy.clip_norm)
        case "per_layer":
            return GroupClipping(privacy.clip_norm, bounds=privacy.clip_rule or "equal")


def _adaptive(privacy: PrivacySettings, expected_lot: float) -> AdaptiveClipping:
    clipping = AdaptiveClipping.for_lot(expected_lot, max_grad_norm=privacy.clip_norm)
    return replace(clipping, **_given_adaptation(privacy))


def _given_adaptation(privacy: PrivacySettings) -> dict[str, float]:
    """Return the settings of a learnt bound that the file gives."""
    given = {
        "quantile": privacy.clip_quantile,
        "learning_rate": privacy.clip_learning_rate,
        "count_noise": privacy.clip_count_noise,
    }
    return {name: value for name, value in given.items() if value is not None}
