"""Random views of examples (data augmentation), drawn anew for each example and step.

With K views an example's gradient is the mean over its views, and is clipped once (De et al. 2022,
"Unlocking High-Accuracy Differentially Private Image Classification through Scale",
arXiv:2204.13650, section 3.2). For any views that are a function of the example and of numbers that
do not depend on data, an example's contribution is still a function of the model and the example,
bounded by C: ε does not change.

Guarantee: a view is a function of one example and of the random stream (seed, client, round; step,
number of the example). It depends on no other example, and not on which others are in the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients.local_settings import ViewSettings
from fedsim.core.errors import InputError
from fedsim.core.streams import restart_at


class ViewError(InputError):
    """An example of this shape cannot have the random views of the settings."""


class Change(ABC):
    """One random change of an example, such as a shift or a flip."""

    @abstractmethod
    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples of this shape can be changed."""

    @abstractmethod
    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return the random numbers (views, ...) for the views of one example.

        Args:
            stream: the random stream of the example.
            views: number of views K.
            shape: shape of the example.
        """

    @abstractmethod
    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return changed copies of rows, where each row is changed by its own random numbers.

        Args:
            x: rows (n, ...).
            numbers: random numbers of the rows (n, ...), drawn by `draw`.
        """


class Shift(Change):
    """Moves an image by up to `most` pixels in each direction and fills the gap with zeros."""

    def __init__(self, most: int) -> None:
        self._most = most

    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples are images larger than the shift."""
        _check_image("shift", shape)
        if min(shape[-2:]) <= self._most:
            raise ViewError(
                f"local.augmentations: a shift of {self._most} pixels can move an image of "
                f"{shape[-2]} x {shape[-1]} pixels out of its frame; use a smaller shift"
            )

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return the pixels (views, 2) by which each view moves down and to the right."""
        return stream.integers(-self._most, self._most, size=(views, 2), endpoint=True)

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the moved images (n, ...)."""
        height, width = x.shape[-2:]
        planes = x.reshape(len(x), -1, height, width)
        padded = torch.nn.functional.pad(planes, (self._most,) * 4)
        start = self._most - numbers  # of the window in the padded image
        rows = start[:, 0, None] + torch.arange(height, device=x.device)
        columns = start[:, 1, None] + torch.arange(width, device=x.device)
        images = torch.arange(len(x), device=x.device)[:, None, None]
        windows = padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]]
        return windows.permute(0, 3, 1, 2).reshape(x.shape)


class Flip(Change):
    """Mirrors an image left to right with probability 1/2."""

    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples are images."""
        _check_image("flip", shape)

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return whether each view is mirrored, booleans (views,)."""
        return stream.integers(0, 2, size=views) == 1

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the images (n, ...), mirrored where `numbers` is true."""
        return torch.where(numbers.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)


class Noise(Change):
    """Adds Gaussian noise to every value, as augmentation: it gives no privacy."""

    def __init__(self, deviation: float) -> None:
        self._deviation = deviation

    def check(self, shape: Sequence[int]) -> None:
        """Accept every shape."""

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return the noise (views, *shape)."""
        drawn = stream.standard_normal((views, *shape), dtype=np.float32)
        return drawn * np.float32(self._deviation)

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the rows (n, ...) with the noise added."""
        return x + numbers.to(x.dtype)


def change_of(settings: ViewSettings) -> Change:
    """Return the change that the settings name."""
    if settings.shift is not None:
        return Shift(settings.shift)
    return Flip() if settings.noise is None else Noise(settings.noise)


class Views:
    """Draws the views of one client's examples in one round.

    Args:
        number: number of views K of each example.
        augment: the random changes of a view, in order; with none, all K views are the example.
        stream: the random stream of the client and the round.
    """

    def __init__(
        self, number: int, augment: Sequence[ViewSettings], stream: np.random.Generator
    ) -> None:
        self.number = number
        self._changes = [change_of(settings) for settings in augment]
        self._stream = stream

    def draw(self, x: Tensor, examples: NDArray[np.int64], step: int) -> Tensor:
        """Return the views (m · K, ...) of a batch; the K views of an example are successive rows.

        Args:
            x: the examples of the batch (m, ...).
            examples: indices (m,) of these examples among the client's examples.
            step: number of the step in the round.
        """
        views, k = x.repeat_interleave(self.number, 0), self.number
        if not self._changes or not len(x):
            return views
        drawn: list[list[np.ndarray]] = []
        for example in examples.tolist():
            restart_at(self._stream, step, example)
            drawn.append([change.draw(self._stream, k, x.shape[1:]) for change in self._changes])
        for change, numbers in zip(self._changes, zip(*drawn, strict=True), strict=True):
            views = change.apply(views, torch.from_numpy(np.concatenate(numbers)).to(x.device))
        return views


def check_views(augment: Sequence[ViewSettings], shape: Sequence[int]) -> None:
    """Check that examples of a shape can have the views of an experiment.

    Args:
        augment: the random changes of a view.
        shape: shape of one example, as the model takes it.

    Raises:
        ViewError: examples of this shape cannot be changed so.
    """
    for settings in augment:
        change_of(settings).check(shape)


def _check_image(name: str, shape: Sequence[int]) -> None:
    if len(shape) not in (2, 3):
        raise ViewError(
            f"local.augmentations: {name} takes images (height, width) or (channels, height, "
            f"width), and "
            f"an example has shape {tuple(shape)}; use {{noise: 0.1}}, or remove "
            f"augmentation_multiplicity and "
            "augmentations"
        )
