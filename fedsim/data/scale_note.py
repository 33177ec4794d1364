"""A note on features of very different sizes, from the public test set alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LARGE = 100.0  # absolute value above which gradients of usual models explode
_MAX_RATIO = 100.0  # of the largest feature to the median one, without a note
_MAX_NAMED = 3


def scale_note(features: NDArray[np.generic], names: Sequence[str] | None) -> str | None:
    """Return a line about features that span orders of magnitude; None without one.

    The largest features decide the gradient and its clipping, so that the others teach nothing.

    Args:
        features: (n, ...) of the public test set, as the model gets them.
        names: name of each feature (k,) of (n, k); None: features have no names.
    """
    if features.dtype.kind != "f" or not len(features):
        return None
    flat = np.abs(features.reshape(len(features), -1)).max(axis=0)
    used = flat[flat > 0]
    if not used.size:
        return None
    usual = float(np.median(used))
    if used.max() <= _LARGE and used.max() <= _MAX_RATIO * usual:
        return None
    if features.ndim > 2 or names is None or len(names) != len(flat):
        return (
            f"features of the public test set are as large as {used.max():,.4g} (the median "
            f"feature: {usual:,.4g}), and SGD learns little from such scales; divide them by a "
            "public constant: data.images: {scale: ...} for images, model.features: [{standardize: "
            "{mean: ..., std: ...}}] for others"
        )
    order = np.argsort(-flat, kind="stable")
    large = [index for index in order if flat[index] > min(_LARGE, _MAX_RATIO * usual)]
    shown = ", ".join(f"{names[i]} up to {flat[i]:,.4g}" for i in large[:_MAX_NAMED])
    more = f" and {len(large) - _MAX_NAMED} more" if len(large) > _MAX_NAMED else ""
    first = names[large[0]]
    return (
        f"features of the public test set span orders of magnitude ({shown}{more}; the median "
        f"feature up to {usual:,.4g}), and SGD learns little from such scales; set public bounds: "
        f"data.dataset.columns: {{{first}: {{range: [LOW, HIGH]}}}}, with log: true where few "
        "values are large"
    )
