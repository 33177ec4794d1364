"""Random views of examples, drawn anew in each step from streams of their own.

With K views an example's gradient is the mean over its views, and is clipped once (De et al. 2022,
"Unlocking High-Accuracy Differentially Private Image Classification through Scale",
arXiv:2204.13650, section 3.2). For any views that are a function of the example and of numbers that
do not depend on data, an example's contribution is still a function of the model and the example,
bounded by C: ε does not change.

Guarantee: a view is a function of one example and of the stream (seed, client, round; step, number
of the example). It depends on no other example, and not on which others are in the lot.
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
    """Views that examples of this shape do not have; one line with the fix."""


class Change(ABC):
    """One random change of a view."""

    @abstractmethod
    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples of this shape can be changed."""

    @abstractmethod
    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return the random numbers of one example (views, ...).

        Args:
            stream: of the example.
            views: K.
            shape: of the example.
        """

    @abstractmethod
    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return changed rows; rows are copied, or changed value by value, each by its own numbers.

        Args:
            x: (n, ...).
            numbers: as `draw` returns them (n, ...).
        """


class Shift(Change):
    """Moves an image by up to `most` pixels in each direction; zeros move in."""

    def __init__(self, most: int) -> None:
        self._most = most

    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples are images larger than the shift."""
        _check_image("shift", shape)
        if min(shape[-2:]) <= self._most:
            raise ViewError(
                f"local.augment: a shift of {self._most} pixels can move an image of "
                f"{shape[-2]} x {shape[-1]} pixels out of its frame; use a smaller shift"
            )

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return pixels down and right (views, 2)."""
        return stream.integers(-self._most, self._most, size=(views, 2), endpoint=True)

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the moved images."""
        height, width = x.shape[-2:]
        planes = x.reshape(len(x), -1, height, width)
        padded = torch.nn.functional.pad(planes, (self._most,) * 4)
        start = self._most - numbers  # of the window in the padded image
        rows = start[:, 0, None] + torch.arange(height, device=x.device)
        columns = start[:, 1, None] + torch.arange(width, device=x.device)
        each = torch.arange(len(x), device=x.device)[:, None, None]
        found = padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]]
        return found.permute(0, 3, 1, 2).reshape(x.shape)


class Flip(Change):
    """Mirrors an image left to right, with probability 1/2."""

    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples are images."""
        _check_image("flip", shape)

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return which views are mirrored (views,)."""
        return stream.integers(0, 2, size=views) == 1

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the images, some of them mirrored."""
        return torch.where(numbers.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)


class Noise(Change):
    """Adds Gaussian noise to every value; it protects nothing."""

    def __init__(self, deviation: float) -> None:
        self._deviation = deviation

    def check(self, shape: Sequence[int]) -> None:
        """Accept any shape."""

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Return the noise (views, *shape)."""
        drawn = stream.standard_normal((views, *shape), dtype=np.float32)
        return drawn * np.float32(self._deviation)

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the rows with their noise: one sum of two numbers for each value."""
        return x + numbers.to(x.dtype)


def change_of(settings: ViewSettings) -> Change:
    """Return the change that the settings name."""
    if settings.shift is not None:
        return Shift(settings.shift)
    return Flip() if settings.noise is None else Noise(settings.noise)


class Views:
    """Draws the views of one client's examples in one round.

    Args:
        number: K.
        augment: the random changes of a view, in order; none: K equal views.
        stream: of the client and the round.
    """

    def __init__(
        self, number: int, augment: Sequence[ViewSettings], stream: np.random.Generator
    ) -> None:
        self.number = number
        self._changes = [change_of(each) for each in augment]
        self._stream = stream

    def draw(self, x: Tensor, examples: NDArray[np.int64], step: int) -> Tensor:
        """Return the views of some examples (m · K, ...), those of one example side by side.

        Args:
            x: the examples (m, ...).
            examples: their numbers among the client's examples (m,).
            step: number of the step in the round.
        """
        views, k = x.repeat_interleave(self.number, 0), self.number
        if not self._changes or not len(x):
            return views
        drawn: list[list[np.ndarray]] = []
        for example in examples.tolist():
            restart_at(self._stream, step, example)
            drawn.append([each.draw(self._stream, k, x.shape[1:]) for each in self._changes])
        for change, numbers in zip(self._changes, zip(*drawn, strict=True), strict=True):
            views = change.apply(views, torch.from_numpy(np.concatenate(numbers)).to(x.device))
        return views


def check_views(augment: Sequence[ViewSettings], shape: Sequence[int]) -> None:
    """Check that examples of a shape have the views of an experiment.

    Args:
        augment: the random changes of a view.
        shape: of one example, as the model takes it.

    Raises:
        ViewError: they do not have them.
    """
    for each in augment:
        change_of(each).check(shape)


def _check_image(name: str, shape: Sequence[int]) -> None:
    if len(shape) not in (2, 3):
        raise ViewError(
            f"local.augment: {name} takes images (height, width) or (channels, height, width), and "
            f"an example has shape {tuple(shape)}; use {{noise: 0.1}}, or remove augmentations and "
            "augment"
        )
