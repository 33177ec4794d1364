"""Fast sampler of noise on the release's grid, for noise that is only simulated.

A value is rint(a float32 normal of Box and Muller) plus a uniform 16-bit dither. A float32 normal
alone cannot be used: above one standard deviation it is a multiple of 2 or more grid points, and
from 32-bit uniforms it ends at 6.8 deviations. The dither fills every grid point, and 16 more bits
in the small end of the radius' uniform reach 8.2 deviations.

Nothing is proven about this law: it simulates the release of `spline_integers`, and protects from
nobody who knows the seed anyway. The variance is 2⁴⁸ and the mean -½, which is 2⁻²⁵ deviations. The
dither changes the density by 2⁻³² He₄(x) / 2880 at x deviations. At 10⁸ draws a chi-square test
does not see a difference from the rounded normal (tests/noise/test_draws.py).

A row takes 7 bytes of its keystream for a value. Those of n pairs are n words of 4 bytes for radii,
n words of 4 bytes for angles, n times 2 bytes that extend the uniforms of the radii, and 2 n times
2 bytes of dither. All are little-endian. The last bits of a normal may differ between processors.
"""

import numpy as np

BYTES = 7  # of keystream for a value; an odd row takes those of one value more


def simulated_integers(words: np.ndarray, into: np.ndarray) -> None:
    """Convert random words to nearly normal integers of standard deviation 2²⁴.

    Args:
        words: uint8 (rows, 7 · cols), with cols rounded up to an even number; C-contiguous; not
            changed.
        into: float64 (rows, cols), overwritten by whole numbers below 2²⁸ in size.
    """
    cols = into.shape[1]
    pairs = -(-cols // 2)
    planes = (
        words[:, : 4 * pairs].view(_WORD),
        words[:, 4 * pairs : 8 * pairs].view(_SIGNED),
        words[:, 8 * pairs : 10 * pairs].view(_HALF),
    )
    dither = words[:, 10 * pairs :].view(_DITHER)
    width = max(1, min(pairs, _BLOCK_PAIRS))
    height = _BLOCK_PAIRS // width
    for top in range(0, len(into), height):
        rows = slice(top, top + height)
        for start in range(0, pairs, width):
            block = rows, slice(start, start + width)
            for part, values in enumerate(_box_muller(*(plane[block] for plane in planes))):
                first = part * pairs + start
                own = into[rows, first : min(first + values.shape[1], cols)]
                whole = np.rint(values, out=values).astype(np.int32)
                whole += dither[rows, first : first + values.shape[1]]
                own[:] = whole[:, : own.shape[1]]


def _box_muller(
    words: np.ndarray, angles: np.ndarray, extensions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return two independent normals of each pair, float32."""
    radius, angle = words.astype(np.float32), angles.astype(np.float32)
    small = extensions.astype(np.float32)
    small += np.float32(0.5)  # never log 0
    small *= np.float32(2.0**-16)
    radius += small
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)  # not log2: without AVX-512 numpy takes thrice the time for it
    radius *= np.float32(-2.0 * _VARIANCE)
    np.sqrt(radius, out=radius)
    angle *= np.float32(2.0 * np.pi * 2.0**-32)
    first = np.cos(angle, out=small)
    first *= radius
    second = np.sin(angle, out=angle)
    second *= radius
    return first, second


_VARIANCE = 2.0**48 - 2.0**32 / 12  # with the dither's, 2⁴⁸
_BLOCK_PAIRS = 1 << 15  # words and intermediate results fit into a core's cache
_WORD, _SIGNED = np.dtype("<u4"), np.dtype("<i4")  # signed words are faster to convert
_HALF, _DITHER = np.dtype("<u2"), np.dtype("<i2")
