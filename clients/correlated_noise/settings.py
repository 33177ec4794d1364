"""Settings of correlated noise: `privacy.noise_correlation`."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from fedsim.core.limits import MAX_NOISE_BANDS
from fedsim.core.settings import Settings

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
