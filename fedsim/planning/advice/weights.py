"""Weights of clients in the average, as the server computes them from public facts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NOISE_WEIGHTS: Mapping[str, Any] = MappingProxyType(
    {"name": "noise", "size_power": 1, "noise_power": 1}
)


def client_weights(weighting: object, examples: Floats, noise: Floats, rates: Floats) -> Floats:
    """Return the clients' shares in the average, (..., K), each row with sum 1.

    Args:
        weighting: `federation.weighting`, a name or a mapping.
        examples: n, (K,).
        noise: noise multipliers z, (..., K).
        rates: sampling rates q, (..., K).
    """
    if weighting == "uniform":
        weights = np.ones(np.broadcast_shapes(noise.shape, rates.shape))
    elif weighting == "examples":
        weights = np.broadcast_to(examples, noise.shape)
    else:
        settings = weighting if isinstance(weighting, Mapping) else NOISE_WEIGHTS
        weights = examples ** settings["size_power"]
        weights = weights / np.maximum(noise / rates, 1e-12) ** settings["noise_power"]
    return weights / weights.sum(axis=-1, keepdims=True)
