"""Random numbers inside a model, such as masks of dropout: those of an example are its own.

Drawn by place in a lot, they would move with every example that is drawn or not, so one example
could change what all others contribute. Here the numbers of an example follow from the client's
key, the step, the call and the example's number, whoever else is in the lot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.clients.model_checks.safety import UnsafeModelError

KEY_BYTES = 16
_WORD = np.dtype("<u4")
_SHARED = 2**40 - 1  # in the place of an example: numbers that all rows share


class ModelRandomness(TorchDispatchMode):
    """Gives torch's random functions numbers of each row's own example, while it is entered.

    Guarantee: a row's numbers are a function of its client's key, the step, the number of the call
    in a pass and the number of its example. They do not depend on the lot, on the row's place or on
    other clients. Rows without an example get the number ½. A function that draws numbers without a
    row for each example (one of stochastic depth for a whole lot, say) draws the same ones for
    every lot of the step.

    Args:
        keys: 16 secret bytes of each client of a tile; None: it is absent.
        shared: 16 bytes for numbers that all rows share.

    Attributes:
        has_begun: whether a pass has begun.
        has_drawn: whether the model has drawn numbers.
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
        """Return False: to keep its compiler away from here, torch would import all of it."""
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
        """Begin a pass over a tile.

        Args:
            examples: the numbers of the examples in each place of the tile, at most `rows` of each.
            rows: R, the rows of a place.
            views: V, rows of each example, side by side.
            step: number of the step in the round.
            clients: the client of each place; None: client k has place k.
        """
        self._examples, self._rows, self._views, self._step = examples, rows, views, step
        self._clients = range(len(examples)) if clients is None else clients
        self._call, self._only = 0, None
        self.has_begun = True

    def only(self, row: int) -> None:
        """Begin a pass over one row of the tile.

        Args:
            row: its place among all rows.
        """
        self._call, self._only = 0, row

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch; a random one gets the numbers of its rows' examples."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout" and not args[2]:
            return func(*args, **kwargs)
        if name not in _FUNCTIONS:
            raise UnsafeModelError(
                f"the model draws random numbers by torch's {name}, which fedsim cannot key by "
                f"example; use dropout, or {', '.join(sorted(_FUNCTIONS))}"
            )
        self.has_drawn = True
        return _FUNCTIONS[name](self._uniforms, func, args, kwargs)

    def _uniforms(self, like: Tensor) -> Tensor:
        """Return numbers in (0, 1), float64, of the shape and on the device of a tensor."""
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
        found = torch.from_numpy((words.astype(np.float64) + 0.5) * 2.0**-32)
        return found.view(like.shape).to(like.device)

    def _words(self, size: int) -> np.ndarray:
        """Return random words of each row (K · R · V, size)."""
        places, views = len(self._examples), self._views
        found = np.full((places, self._rows, views * size), 2**31, dtype=_WORD)
        for client, own, rows in zip(self._clients, self._examples, found, strict=True):
            stream = self._streams[client]
            for place, example in enumerate(own.tolist()):
                if stream is not None:
                    _fill(stream, self._nonce(example), rows[place])
        return found.reshape(places * self._rows * views, size)

    def _nonce(self, example: int) -> bytes:
        """Return the first block of the numbers of an example in this call: 2³² blocks are its."""
        parts = (self._step, 4), (self._call, 3), (example, 5), (0, 4)
        return b"".join(value.to_bytes(size, "big") for value, size in parts)


def _stream(key: bytes) -> Any:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def _fill(stream: Any, nonce: bytes, words: np.ndarray) -> None:
    stream.reset_nonce(nonce)
    words[:] = np.frombuffer(stream.update(bytes(words.nbytes)), _WORD)


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
    found = empty(args[0], **kwargs)
    return found.copy_(draw(found))


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
