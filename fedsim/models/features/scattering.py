"""The scattering transform of an image, by one or two layers of fixed wavelets and averages.

For an image x the transform computes S0 = x * φ, S1 = |x * ψ1| * φ and S2 = ||x * ψ1| * ψ2| * φ,
where * is convolution. The ψ are Morlet wavelets of J scales and L directions, and φ is a Gaussian
of width 2^J. S0, S1 and S2 have one value for each square of 2^J x 2^J pixels. Convolutions are
computed as products of Fourier transforms, one image at a time.
(Bruna and Mallat, "Invariant scattering convolution networks", IEEE TPAMI 2013, arXiv:1203.1513.
For private training: Tramèr and Boneh, ICLR 2021.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import pi

import numpy as np
from numpy.typing import NDArray

from fedsim.models.settings import ScatteringSettings

Example = NDArray[np.float64]

_WIDTH = 0.8  # of a wavelet's Gaussian at scale 0, in pixels
_FREQUENCY = 3 * pi / 4  # of a wavelet at scale 0, in radians per pixel


@dataclass(frozen=True)
class FilterBank:
    """The Fourier transforms of the scattering filters for images of one size.

    Guarantee: |φ(ω)|² + Σ (|ψ(ω)|² + |ψ(-ω)|²) / 2 ≤ 1 at every frequency ω, so no layer adds
    energy.

    Attributes:
        low_pass: Fourier transform of the averaging filter φ, (height, width).
        wavelets: Fourier transforms of the wavelets ψ, (scales, directions, height, width).
    """

    low_pass: Example
    wavelets: Example

    @classmethod
    def of(cls, scales: int, directions: int, shape: tuple[int, int]) -> "FilterBank":
        """Return the filters for images of the given size.

        Args:
            scales: number of scales J; wavelet j has the width 2^j.
            directions: number L of wavelet directions over half of the circle.
            shape: height and width of the images, in pixels.
        """
        low_pass = _gaussian(_WIDTH * 2 ** (scales - 1), 0.0, 1.0, 0.0, shape)
        low_pass = low_pass / low_pass[0, 0]
        wavelets = np.stack(
            [
                [_wavelet(j, pi * k / directions, directions, shape) for k in range(directions)]
                for j in range(scales)
            ]
        )
        energy = np.square(wavelets).sum(axis=(0, 1))
        energy = (energy + _mirrored(energy)) / 2
        energy[0, 0] = 0.0
        room = 1.0 - np.square(low_pass)
        room[0, 0] = 1.0
        gain = (energy / np.maximum(room, np.finfo(float).tiny)).max()
        return cls(low_pass, wavelets / np.sqrt(gain * (1 + 1e-12)))


def scattering(
    settings: ScatteringSettings, shape: tuple[int, ...]
) -> Callable[[Example], Example]:
    """Return the function that maps an image to coefficients (channels * paths, rows, columns).

    A path is a sequence of at most two wavelets. Each square of 2^J x 2^J pixels gives one row and
    column, where J is the number of scales. Images are padded by their mirror images.

    Args:
        settings: numbers of scales, directions and layers.
        shape: shape of an image, (height, width) or (channels, height, width).
    """
    step = 2**settings.scales
    margins = [(step + step // 2, _right_margin(side, step)) for side in shape[-2:]]
    rows, columns = (-(-side // step) for side in shape[-2:])
    height, width = (
        side + before + after for side, (before, after) in zip(shape[-2:], margins, strict=True)
    )
    bank = FilterBank.of(settings.scales, settings.directions, (height, width))

    def transform(image: Example) -> Example:
        channels = image.reshape(-1, *shape[-2:])
        padded = np.pad(channels, [(0, 0), *margins], mode="symmetric")
        paths = [
            averaged(part, bank, step)
            for channel in padded
            for part in layers(channel, bank, settings)
        ]
        return np.concatenate(paths)[:, 2 : 2 + rows, 2 : 2 + columns]

    return transform


def layers(image: Example, bank: FilterBank, settings: ScatteringSettings) -> Iterator[Example]:
    """Yield arrays (paths, height, width) of absolute wavelet responses, layer by layer.

    A path is a sequence of at most two wavelets. The responses are not yet averaged. The first
    array is the image itself. The second layer uses only wavelets that are wider than the wavelet
    of the first layer, because the absolute value moves energy to lower frequencies.

    Args:
        image: a periodic image (height, width).
        bank: the filters for images of that shape.
        settings: numbers of scales, directions and layers.
    """
    yield image[None]
    first = [np.abs(np.fft.ifft2(np.fft.fft2(image) * filters)) for filters in bank.wavelets]
    yield from first
    if settings.layers < 2:
        return
    for scale, moduli in enumerate(first[:-1]):
        spectra = np.fft.fft2(moduli)
        for spectrum in spectra:
            wider = bank.wavelets[scale + 1 :].reshape(-1, *image.shape)
            yield np.abs(np.fft.ifft2(spectrum * wider))


def averaged(stack: Example, bank: FilterBank, step: int) -> Example:
    """Return the low-pass averages of images at every `step`-th pixel.

    The result has shape (paths, height / step, width / step). It is computed by folding the Fourier
    transform of each averaged image.

    Args:
        stack: periodic images (paths, height, width); both sides are multiples of `step`.
        bank: the filters for images of that size; only the low-pass filter is used.
        step: distance between two averages, in pixels.
    """
    height, width = stack.shape[-2:]
    spectra = np.fft.fft2(stack) * bank.low_pass
    folded = spectra.reshape(-1, step, height // step, step, width // step).mean(axis=(1, 3))
    return np.fft.ifft2(folded).real


def _right_margin(side: int, step: int) -> int:
    """Return a right margin >= `step` pixels that makes the padded side a multiple of `step`."""
    left = step + step // 2
    return -(-(left + side + step) // step) * step - left - side


def _wavelet(scale: int, angle: float, directions: int, shape: tuple[int, int]) -> Example:
    """Return the Fourier transform of a Morlet wavelet, which is 0 at the frequency 0."""
    width, slant = _WIDTH * 2**scale, 4 / directions
    shifted = _gaussian(width, angle, slant, _FREQUENCY / 2**scale, shape)
    centred = _gaussian(width, angle, slant, 0.0, shape)
    wavelet = shifted - centred * (shifted[0, 0] / centred[0, 0])
    wavelet[0, 0] = 0.0
    return wavelet


def _gaussian(
    width: float, angle: float, slant: float, frequency: float, shape: tuple[int, int]
) -> Example:
    """Return the Fourier transform of a modulated Gaussian that is sampled at pixels.

    Sampling repeats the spectrum with the period 2π; the nearest repetitions are added.
    """
    result = np.zeros(shape)
    rows, columns = (2 * pi * np.fft.fftfreq(side) for side in shape)
    turns = range(-2, 3)
    for down in turns:
        for right in turns:
            v, u = np.meshgrid(rows + 2 * pi * down, columns + 2 * pi * right, indexing="ij")
            along = u * np.cos(angle) + v * np.sin(angle) - frequency
            across = v * np.cos(angle) - u * np.sin(angle)
            exponent = np.square(along) + np.square(across / slant)
            result += np.exp(-0.5 * width**2 * exponent)
    return result


def _mirrored(values: Example) -> Example:
    """Return the values at the frequencies -ω."""
    return np.roll(values[::-1, ::-1], 1, axis=(0, 1))
