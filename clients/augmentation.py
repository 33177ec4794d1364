"""Random views of examples (data augmentation), drawn anew for each example and step.

With K views, an example's gradient is the mean over its views and is clipped once (De et al. 2022,
"Unlocking High-Accuracy Differentially Private Image Classification through Scale",
arXiv:2204.13650, section 3.2). Views depend only on the example and on random numbers that do not
depend on data. So an example's contribution still depends only on the model and the example, and is
bounded by the clipping norm: ε does not change.

Guarantee: a view depends only on its example and on a random stream. The stream is fixed by seed,
client, round, step and the number of the example. No other example, in the batch or not, matters.
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
    """Error if the random views of the settings are impossible for examples of this shape."""


class Change(ABC):
    """Base class of a random change of an example, such as a shift or a flip."""

    @abstractmethod
    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError if examples of this shape cannot be changed."""

    @abstractmethod
    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Draw the random numbers (views, ...) for the views of one example.

        Args:
            stream: the random stream of the example.
            views: number of views K.
            shape: shape of the example.
        """

    @abstractmethod
    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return changed copies of examples, each changed by its own random numbers.

        Args:
            x: n examples (n, ...).
            numbers: random numbers for each example (n, ...), drawn by `draw`.
        """


class Shift(Change):
    """Random shift of an image by at most `most` pixels in each direction; gaps become zeros."""

    def __init__(self, most: int) -> None:
        self._most = most

    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError unless examples are images, each larger than the shift."""
        _check_image("shift", shape)
        if min(shape[-2:]) <= self._most:
            raise ViewError(
                f"local.augmentations: a shift of {self._most} pixels can move an image of "
                f"{shape[-2]} x {shape[-1]} pixels out of its frame; use a smaller shift"
            )

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Draw by how many pixels (views, 2) each view moves down and to the right."""
        return stream.integers(-self._most, self._most, size=(views, 2), endpoint=True)

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the shifted images (n, ...)."""
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
    """Random mirroring of an image, left to right, with probability 1/2."""

    def check(self, shape: Sequence[int]) -> None:
        """Raise ViewError if examples are not images."""
        _check_image("flip", shape)

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Draw whether each view is mirrored, as booleans (views,)."""
        return stream.integers(0, 2, size=views) == 1

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the images (n, ...), mirrored where `numbers` is true."""
        return torch.where(numbers.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)


class Noise(Change):
    """Gaussian noise on every value of an example, as augmentation; it gives no privacy."""

    def __init__(self, deviation: float) -> None:
        self._deviation = deviation

    def check(self, shape: Sequence[int]) -> None:
        """Accept examples of every shape."""

    def draw(self, stream: np.random.Generator, views: int, shape: Sequence[int]) -> np.ndarray:
        """Draw the noise, of shape (views, *shape)."""
        drawn = stream.standard_normal((views, *shape), dtype=np.float32)
        return drawn * np.float32(self._deviation)

    def apply(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the examples (n, ...) with the noise added."""
        return x + numbers.to(x.dtype)


def change_of(settings: ViewSettings) -> Change:
    """Return the random change (shift, flip or noise) that the settings describe."""
    if settings.shift is not None:
        return Shift(settings.shift)
    return Flip() if settings.noise is None else Noise(settings.noise)


class Views:
    """Random views of one client's examples in one round.

    Args:
        number: number of views K of each example.
        augment: the random changes of a view, in order. If empty, all K views equal the example.
        stream: the random stream of the client and the round.
    """

    def __init__(
        self, number: int, augment: Sequence[ViewSettings], stream: np.random.Generator
    ) -> None:
        self.number = number
        self._changes = [change_of(settings) for settings in augment]
        self._stream = stream

    def draw(self, x: Tensor, examples: NDArray[np.int64], step: int) -> Tensor:
        """Return the views of a batch of m examples with K views each, a tensor (m · K, ...).

        The K views of an example are successive rows.

        Args:
            x: the examples of the batch (m, ...).
            examples: positions (m,) of these examples among the client's examples.
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
    """Check that examples of a shape can have the random views of an experiment.

    Args:
        augment: the random changes of a view.
        shape: shape of one example, as the model takes it.

    Raises:
        ViewError: examples of this shape cannot be changed in these ways.
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
