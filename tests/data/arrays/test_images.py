"""Images of users: recognised, moved and scaled by constants, or refused with the fix."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.data import DataError
from fedsim.data.examples import as_images, to_dataset
from fedsim.data.settings import ImageSettings

Y = np.array([0, 1, 1])
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (3, 8, 6), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)


def features(array: np.ndarray, **settings: object) -> np.ndarray:
    return to_dataset(array, Y, images=ImageSettings.model_validate(settings)).train.features


def archive(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "images.npz", **arrays)
    return folder / "images.npz"


def test_bytes_are_divided_by_255_and_grey_images_get_a_channel() -> None:
    grey = to_dataset(GREY, Y).train.features
    assert grey.dtype == np.float32
    assert np.array_equal(grey[:, 0], GREY.astype(np.float32) / np.float32(255))


def test_the_constant_does_not_depend_on_the_values() -> None:
    dark = np.full((3, 8, 6), 5, dtype=np.uint8)
    assert np.unique(to_dataset(dark, Y).train.features).tolist() == [np.float32(5) / 255]


def test_channels_that_come_last_come_first() -> None:
    moved = to_dataset(COLOUR, Y).train.features
    assert moved.shape == (3, 3, 8, 6)
    assert np.array_equal(moved[1, 2], COLOUR[1, :, :, 2].astype(np.float32) / np.float32(255))
    first = np.moveaxis(COLOUR, -1, 1)
    assert np.array_equal(to_dataset(first, Y).train.features, moved)


def test_settings_decide_where_they_are_given() -> None:
    colour = COLOUR.astype(np.float64)
    assert features(colour, channels="last").shape == (3, 3, 8, 6)
    assert features(colour, channels="first").shape == (3, 8, 6, 3)
    assert features(GREY.astype(float), channels="none").shape == (3, 1, 8, 6)
    assert np.array_equal(features(GREY, scale=1)[:, 0], GREY)
    assert np.array_equal(features(colour, channels="last", scale=255), features(COLOUR))


def test_tables_and_series_stay_as_they_are() -> None:
    for array in (GREY[:, 0], GREY.astype(float), np.moveaxis(COLOUR, -1, 1).astype(np.float32)):
        assert as_images(array, None, "x") is array
    tokens = to_dataset(GREY, Y, tokens=True).train.features
    assert np.array_equal(tokens, GREY)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("y", ("x_train", "y_train", "x_test", "y_test")),
        ("y_train", ("x_train", "y_train", "x_test", "y_test")),
        ("y", ("X_train", "y_train", "X_test", "y_test")),
        ("labels", ("train_images", "train_labels", "test_images", "test_labels")),
    ],
)
def test_names_of_keras_and_medmnist(
    read_file: Any, target: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    arrays = dict(zip(names, (COLOUR, Y[:, None], COLOUR[:2], Y[:2, None]), strict=True))
    dataset = read_file(archive(tmp_path, **arrays, val_images=GREY), target)
    assert dataset.train.input_shape == (3, 8, 6)
    assert dataset.train.targets.tolist() == Y.tolist()
    assert dataset.test is not None
    assert len(dataset.test) == 2


def test_split_names_without_a_test_set(read_file: Any, tmp_path: Path) -> None:
    assert read_file(archive(tmp_path, x_train=GREY, y_train=Y), "y").test is None


@pytest.mark.parametrize(
    ("arrays", "settings", "message"),
    [
        ({"x": COLOUR / 255}, {}, r"x has shape \(3, 8, 6, 3\), which looks like .*channels: last"),
        ({"x": np.ones((3, 7, 7, 2))}, {}, "looks like images with channels last"),
        ({"x": GREY}, {"channels": "last"}, r"channels: last is for .* x has shape \(3, 8, 6\)"),
        ({"x": COLOUR}, {"channels": "none"}, r"none is for arrays \(n, height, width\)"),
        ({"x": GREY.astype(str)}, {}, "x must be numeric"),
        ({"x": GREY, "x_test": GREY}, {}, "a test set needs both of 'x_test', 'y_test'"),
        ({"x": GREY, "x_test": COLOUR, "y_test": Y}, {}, "training and test features must have"),
        ({"x": np.full((3, 8, 6), np.nan)}, {}, "NaN or infinity in 3 of 3 examples"),
        ({"x": GREY.astype(complex)}, {}, "must be numeric, got complex128"),
        ({"x": GREY[:, :0]}, {}, "an example must have at least one feature"),
    ],
)  # fmt: skip
def test_bad_images_get_one_clear_line(
    read_file: Any,
    arrays: dict[str, np.ndarray],
    settings: dict[str, object],
    message: str,
    tmp_path: Path,
) -> None:
    path = archive(tmp_path, y=Y, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        read_file(path, "y", images=ImageSettings.model_validate(settings))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("pixels_train", "y_train"), "features must be one of .*'x_train'; got"),
        (("x_train", "images_train", "y_train"), "features must be one of"),
        (("x_train", "x_test", "y_train"), "needs both of 'x_test', 'y_test'"),
    ],
)
def test_unclear_split_names_are_refused(
    read_file: Any, names: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    arrays = {name: Y if name.startswith("y") else GREY for name in names}
    with pytest.raises(DataError, match=message):
        read_file(archive(tmp_path, **arrays), "y")
