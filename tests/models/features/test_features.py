"""Fixed transforms: values, shapes, and one example apart from all others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from fedsim.core.errors import InputError
from fedsim.models.features.transforms import _TRANSFORMS, FeaturePipeline
from fedsim.models.settings import _SHAPES, FEATURES, FeatureSettings

EACH = {
    "center": {"center": 0.3},
    "unit_norm": "unit_norm",
    "log": {"log": 0.5},
    "standardize": {"standardize": {"mean": 0.2, "std": [0.5]}},
    "hog": "hog",
    "random_fourier": {"random_fourier": {"dim": 16, "gamma": 0.5}},
    "scattering": {"scattering": {"scales": 1, "directions": 3}},
}
PIXELS = st.floats(-1e3, 1e3, width=32)


def pipeline(*items) -> FeaturePipeline:
    return FeaturePipeline([FeatureSettings.model_validate(item) for item in items])


def test_every_transform_has_a_shape_a_function_and_a_test():
    assert set(FEATURES) == set(_SHAPES) == set(_TRANSFORMS) == set(EACH)


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=15, deadline=None)
@given(x=arrays(np.float32, (4, 1, 6, 5), elements=PIXELS), data=st.data())
def test_other_examples_change_no_bit_of_an_examples_features(name, x, data):
    transform = pipeline(EACH[name], {"center": "own"}, "unit_norm")
    before = transform(x)
    kept = data.draw(st.integers(0, 3))
    other = data.draw(arrays(np.float32, (4, 1, 6, 5), elements=PIXELS))
    other[kept] = x[kept]
    assert transform(other)[kept].tobytes() == before[kept].tobytes()
    assert transform(x[kept : kept + 1])[0].tobytes() == before[kept].tobytes()
    assert before.shape[1:] == transform.output_shape((1, 6, 5))
    assert before.dtype == np.float32


@pytest.mark.parametrize("name", EACH)
def test_a_client_without_examples_has_no_features(name):
    assert pipeline(EACH[name])(np.zeros((0, 1, 6, 5), np.float32)).shape[0] == 0


def test_constants_are_subtracted_and_divided_per_column():
    x = np.array([[1.0, 4.0]], np.float32)
    assert pipeline({"center": [1, 2]})(x).tolist() == [[0.0, 2.0]]
    assert pipeline({"standardize": {"mean": 1, "std": [2, 3]}})(x).tolist() == [[0.0, 1.0]]
    images = np.ones((1, 2, 3, 3), np.float32)
    assert pipeline({"center": [1, 3]})(images)[0, :, 0, 0].tolist() == [0.0, -2.0]
    assert pipeline({"center": "own"})(x).tolist() == [[-1.5, 1.5]]


def test_a_norm_is_one_also_of_tiny_and_huge_examples_and_zeros_stay():
    x = np.array([[3, 4], [3e-38, 4e-38], [3e38, 0], [0, 0]], np.float32)
    norms = np.linalg.norm(pipeline("unit_norm")(x), axis=1)
    np.testing.assert_allclose(norms, [1, 1, 1, 0], rtol=1e-6)


def test_the_logarithm_is_odd():
    x = np.array([[0.0, np.e - 1, 1 - np.e]], np.float32)
    np.testing.assert_allclose(pipeline("log")(x), [[0, 1, -1]], rtol=1e-6)


def test_random_fourier_features_have_the_gaussian_kernel():
    """The mean of dim = 20,000 terms has a deviation of at most 0.005."""
    x = np.array([[0.3, -0.2], [0.1, 0.6], [-1.0, 0.4]], np.float32)
    transform = pipeline({"random_fourier": {"dim": 20_000, "gamma": 0.7, "seed": 3}})
    features = transform(x).astype(np.float64)
    distances = np.square(x[:, None] - x[None]).sum(axis=2)
    np.testing.assert_allclose(features @ features.T, np.exp(-0.7 * distances), atol=0.03)


def test_another_seed_has_other_directions():
    x = np.ones((1, 3), np.float32)
    first, second = (
        pipeline({"random_fourier": {"dim": 4, "gamma": 1, "seed": seed}})(x) for seed in (0, 1)
    )
    assert not np.allclose(first, second)


def test_an_edge_is_in_the_map_of_its_direction():
    """Brighter to the right: direction 0; brighter downwards: a quarter of the circle."""
    right = np.tile(np.arange(6, dtype=np.float32), (6, 1))
    x = np.stack([right, right.T, right[:, ::-1], np.ones((6, 6), np.float32)])
    maps = pipeline({"hog": {"bins": 4, "window": 2, "power": 1}})(x)
    assert maps.shape == (4, 4, 5, 5)
    energy = maps.sum(axis=(2, 3))
    assert np.argmax(energy[:3], axis=1).tolist() == [0, 1, 2]
    np.testing.assert_allclose(energy[:3].max(axis=1), energy[:3].sum(axis=1), rtol=1e-6)
    assert not maps[3].any()
    # A gradient of 1 a pixel in the middle, under a window of 2 x 2 with Hann weights 0.75.
    assert maps[0, 0, 2, 2] == pytest.approx(4 * 0.75**2)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 9, 7)])
def test_images_of_any_size_have_the_stated_shape(shape):
    transform = pipeline({"hog": {"window": 3, "stride": 2}})
    features = transform(np.zeros((2, *shape), np.float32))
    assert features.shape[1:] == transform.output_shape(shape)


def test_a_transform_that_overflows_is_an_error_of_the_file():
    with pytest.raises(InputError, match=r"model\.features: .* no finite float32 .* example 1"):
        pipeline({"standardize": {"std": 1e-30}})(np.array([[0.0], [1e30]], np.float32))


def test_a_flat_example_is_no_image():
    with pytest.raises(InputError, match=r"model\.features\.1: hog takes images"):
        pipeline("unit_norm", "hog").output_shape((64,))


@pytest.mark.parametrize("item", EACH.values())
def test_settings_are_read_back_as_they_are_written(item):
    one = FeatureSettings.model_validate(item)
    assert FeatureSettings.model_validate(one.model_dump()) == one
    assert FeatureSettings.model_validate_json(one.model_dump_json()) == one


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("pca", "pca is computed from the data of several clients"),
        ({"whiten": 3}, "whiten is computed from the data"),
        ({"standardize": "data"}, "'data' is computed from the data"),
        ({"standardize": "fit"}, "'fit' is computed from the data"),
        ("unit_nrm", "did you mean 'unit_norm'"),
        ({"center": 0.1, "log": 1.0}, "names one transform, got center and log"),
        ({"center": "mean"}, "must be a public number"),
        ({"standardize": {"std": 0}}, "must be > 0"),
        ("random_fourier", "needs its settings"),
    ],
)
def test_wrong_items_are_refused_with_the_reason(item, message):
    with pytest.raises(ValidationError, match=message):
        FeatureSettings.model_validate(item)
