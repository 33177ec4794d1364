"""Random numbers of single examples: their augmented views, and those drawn inside the model.

If the position in the batch determined an example's random numbers, adding or removing another
example would change them, and so the gradient. Here they do not depend on the rest of the batch.

- Views (data augmentation) are drawn anew for each example and step. A view depends only on its
  example and on a stream that is fixed by seed, client, round, step and the number of the example.
  With K views, an example's gradient is the mean over its views and is clipped once (De et al.
  2022, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
  arXiv:2204.13650, section 3.2). So its contribution still depends only on the model and the
  example, and is bounded by the clipping norm: ε does not change.
- Numbers inside the model, such as dropout masks, are a function of the client's key, the step, the
  index of the example, and how often the model has drawn before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.clients.local_settings import ViewSettings
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.core.errors import InputError
from fedsim.core.streams import restart_at

KEY_BYTES = 16
_WORD = np.dtype("<u4")
_SHARED = 2**40 - 1  # takes the place of an example's number where all rows share random numbers


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


class ModelRandomness(TorchDispatchMode):
    """Context in which torch's random functions return numbers that are keyed by example.

    Guarantee: the random numbers of an example are a function of the client's key, the step, the
    index of the example, and the count of random calls before in the same forward pass. They do not
    depend on the batch, on the position in it or on other clients. Padding rows get ½ as their
    random number. A random function whose result has no row for each example (such as stochastic
    depth for a whole batch) draws the same numbers for every batch of the step.

    Args:
        keys: 16 secret bytes of each client; an entry is None where the client is absent.
        shared: 16 secret bytes, the key of random numbers that all rows share.

    Attributes:
        has_begun: whether `begin` has been called.
        has_drawn: whether the model has drawn random numbers.
    """

    def __init__(self, keys: Sequence[bytes | None], shared: bytes) -> None:
        super().__init__()
        self._streams = [None if key is None else _stream(key) for key in keys]
        self._shared = _stream(shared)
        self._examples: Sequence[np.ndarray] = ()
        self._clients: Sequence[int] = ()
        self._rows, self._views, self._step, self._call = 0, 1, 0, 0
        self._only: int | None = None
        self.has_begun = self.has_drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since with True torch would import its whole compiler."""
        return False

    def begin(
        self,
        examples: Sequence[np.ndarray],
        *,
        rows: int,
        views: int = 1,
        step: int = 0,
        clients: Sequence[int] | None = None,
    ) -> None:
        """Prepare random numbers for a forward pass on a padded batch.

        A padded batch consists of slots. A slot is R rows, which hold examples of one client or
        zeros.

        Args:
            examples: indices of the examples in each slot, at most `rows` of them.
            rows: number of rows R of a slot.
            views: number of augmented views V of each example, in successive rows.
            step: number of the step in the round, from 0.
            clients: index of the client of each slot; with None, slot k belongs to client k.
        """
        self._examples, self._rows, self._views, self._step = examples, rows, views, step
        self._clients = range(len(examples)) if clients is None else clients
        self._call, self._only = 0, None
        self.has_begun = True

    def only(self, row: int) -> None:
        """Prepare random numbers for a forward pass on a single row of the padded batch.

        Args:
            row: index of the row among all rows of the padded batch.
        """
        self._call, self._only = 0, row

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, with numbers keyed by example if the function is random."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or _drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if name not in _FUNCTIONS:
            raise UnsafeModelError(
                f"the model draws random numbers by torch's {name}, which fedsim cannot key by "
                f"example; use dropout, or {', '.join(sorted(_FUNCTIONS))}"
            )
        self.has_drawn = True
        return _FUNCTIONS[name](self._uniforms, func, args, kwargs)

    def _uniforms(self, like: Tensor) -> Tensor:
        """Return uniform numbers in (0, 1), float64, with the shape and device of a tensor."""
        n, shape = len(self._examples) * self._rows * self._views, like.shape
        first = shape[0] if shape else 0
        if self._only is not None and first == 1:
            words = self._words(like.numel())[[self._only]]
        elif (first and first % n == 0) or n in np.cumprod(shape):  # (K, R · V, ...) under vmap
            words = self._words(like.numel() // n)
        elif n > 1 and n in shape:  # sequences with time first
            axis = list(shape).index(n)
            rest = (*shape[:axis], *shape[axis + 1 :])
            words = self._words(like.numel() // n).reshape(n, *rest)
            words = np.moveaxis(words, 0, axis)
        else:
            words = np.empty((1, like.numel()), _WORD)
            _fill(self._shared, self._nonce(_SHARED), words[0])
        self._call += 1
        uniforms = torch.from_numpy((words.astype(np.float64) + 0.5) * 2.0**-32)
        return uniforms.view(like.shape).to(like.device)

    def _words(self, size: int) -> np.ndarray:
        """Return random 32-bit words for each row (K · R · V, size)."""
        places, views = len(self._examples), self._views
        words = np.full((places, self._rows, views * size), 2**31, dtype=_WORD)
        for client, examples, rows in zip(self._clients, self._examples, words, strict=True):
            stream = self._streams[client]
            for place, example in enumerate(examples.tolist()):
                if stream is not None:
                    _fill(stream, self._nonce(example), rows[place])
        return words.reshape(places * self._rows * views, size)

    def _nonce(self, example: int) -> bytes:
        """Return the AES counter at which an example's 2³² blocks of this call begin."""
        parts = (self._step, 4), (self._call, 3), (example, 5), (0, 4)
        return b"".join(value.to_bytes(size, "big") for value, size in parts)


def _stream(key: bytes) -> Any:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def _fill(stream: Any, nonce: bytes, words: np.ndarray) -> None:
    stream.reset_nonce(nonce)
    words[:] = np.frombuffer(stream.update(bytes(words.nbytes)), _WORD)


def _drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a random function is a dropout in evaluation, or attention without dropout."""
    schema = func._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return given.get("train") is False or given.get("dropout_p") == 0.0  # train: None drops


Draw = Callable[[Tensor], Tensor]


def _bernoulli(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    like, p = args[0], args[1] if len(args) > 1 else kwargs.get("p", args[0])
    return (draw(like) < p).to(like.dtype)


def _bernoulli_(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return args[0].copy_(draw(args[0]) < p)


def _native_dropout(draw: Draw, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    x, p = args[0], args[1]
    mask = draw(x) >= p
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


def _rand(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    empty = torch.empty_like if isinstance(args[0], Tensor) else torch.empty
    values = empty(args[0], **kwargs)
    return values.copy_(draw(values))


def _randn(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    return torch.special.ndtri(_rand(draw, func, args, kwargs))


def _uniform_(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
    return args[0].copy_(low + (high - low) * draw(args[0]))


def _normal_(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    mean, std = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
    return args[0].copy_(mean + std * torch.special.ndtri(draw(args[0])))


def _exponential_(draw: Draw, func: Any, args: Any, kwargs: Any) -> Tensor:
    rate = args[1] if len(args) > 1 else 1.0
    return args[0].copy_(-torch.log(draw(args[0])) / rate)


_FUNCTIONS: Mapping[str, Callable[[Draw, Any, Any, Any], Any]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "exponential_": _exponential_,
    "native_dropout": _native_dropout,
    "normal_": _normal_,
    "rand": _rand,
    "rand_like": _rand,
    "randn": _randn,
    "randn_like": _randn,
    "uniform_": _uniform_,
}
