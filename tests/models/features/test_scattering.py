"""The scattering transform against facts that follow from its definition."""

import numpy as np
import pytest

from fedsim.models.features.scattering import FilterBank, averaged, layers
from fedsim.models.features.transforms import FeaturePipeline
from fedsim.models.settings import FeatureSettings, ScatteringSettings

SETTINGS = ScatteringSettings(scales=3, directions=6)
BANK = FilterBank.of(3, 6, (32, 40))


def pipeline(**values) -> FeaturePipeline:
    return FeaturePipeline([FeatureSettings.model_validate({"scattering": values})])


def coefficients(image: np.ndarray, settings: ScatteringSettings = SETTINGS) -> np.ndarray:
    """Averages at every pixel, of a periodic image."""
    return np.concatenate([averaged(part, BANK, 1) for part in layers(image, BANK, settings)])


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(32, 40))


@pytest.mark.parametrize(("scales", "directions", "side"), [(1, 1, 6), (2, 8, 20), (4, 5, 48)])
def test_no_frequency_is_amplified(scales, directions, side):
    """The Littlewood-Paley sum, recomputed from its definition, is at most 1 and reaches it."""
    bank = FilterBank.of(scales, directions, (side, side))
    total = np.square(bank.low_pass)
    for wavelet in bank.wavelets.reshape(-1, side, side):
        for y, x in np.ndindex(side, side):
            mirror = wavelet[-y % side, -x % side]
            total[y, x] += (wavelet[y, x] ** 2 + mirror**2) / 2
    assert 0.999 < total.max() <= 1 + 1e-12


def test_wavelets_have_no_mean_and_the_average_keeps_it():
    assert not BANK.wavelets[..., 0, 0].any()
    assert BANK.low_pass[0, 0] == 1


def test_a_path_is_the_average_of_the_modulus_of_the_convolution(image):
    """One first and one second path by sums over pixels, from the filters in space."""
    small = image[:6, :8]
    bank = FilterBank.of(2, 3, (6, 8))

    def convolved(x, spectrum):
        kernel = np.fft.ifft2(spectrum)
        result = np.zeros(x.shape, complex)
        for y, z in np.ndindex(x.shape):
            result += kernel[y, z] * np.roll(x, (y, z), (0, 1))
        return result

    settings = ScatteringSettings(scales=2, directions=3)
    parts = [averaged(part, bank, 2) for part in layers(small, bank, settings)]
    found = np.concatenate(parts)
    assert len(found) == settings.paths == 1 + 2 * 3 + 9
    first = np.abs(convolved(small, bank.wavelets[0, 1]))
    second = np.abs(convolved(first, bank.wavelets[1, 2]))
    for place, modulus in ((0, small), (2, first), (1 + 6 + 3 + 2, second)):
        expected = np.real(convolved(modulus, bank.low_pass))[::2, ::2]
        np.testing.assert_allclose(found[place], expected, atol=1e-12)


def test_the_energy_of_all_paths_is_at_most_that_of_the_image(image):
    energy = np.square(image).sum()
    assert 0.2 * energy < np.square(coefficients(image)).sum() <= energy


def test_two_images_are_no_further_apart_than_before(image):
    other = image + np.random.default_rng(6).normal(size=image.shape)
    distance = np.linalg.norm(coefficients(image) - coefficients(other))
    assert distance <= np.linalg.norm(image - other)


def test_a_constant_image_has_its_average_alone():
    found = pipeline(scales=2)(np.full((1, 1, 12, 9), 3, np.float32))[0]
    assert found.shape == (81, 3, 3)
    np.testing.assert_allclose(found[0], 3, rtol=1e-6)
    np.testing.assert_allclose(found[1:], 0, atol=1e-12)


def test_twice_the_image_has_twice_the_coefficients_and_its_negative_the_same_moduli(image):
    transform = pipeline(scales=2, directions=4)
    x = image[None].astype(np.float32)
    found = transform(x)
    np.testing.assert_allclose(transform(2 * x), 2 * found, rtol=1e-6)
    np.testing.assert_allclose(transform(-x)[:, 1:], found[:, 1:], rtol=1e-6)


def test_a_shift_far_below_the_width_of_the_average_changes_little(image):
    """A shift moves the coefficients of a periodic image exactly; the averages vary slowly."""
    found = coefficients(image)
    shifted = coefficients(np.roll(image, 1, axis=1))
    np.testing.assert_allclose(shifted, np.roll(found, 1, axis=2), atol=1e-12)
    change = np.linalg.norm(shifted - found) / np.linalg.norm(found)
    assert change < 0.2 < np.linalg.norm(np.roll(image, 1, axis=1) - image) / np.linalg.norm(image)


def test_a_turned_wave_is_in_the_path_of_its_direction():
    y, x = np.mgrid[:16, :16]
    found = pipeline(scales=1, directions=4, layers=1)(
        np.stack([np.cos(2.3 * x), np.cos(2.3 * y)]).astype(np.float32)
    )
    strength = np.abs(found[:, 1:]).sum(axis=(2, 3))
    assert np.argmax(strength, axis=1).tolist() == [0, 2]
