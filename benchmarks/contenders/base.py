"""What a contender is, and the work that all of them do."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"mlp": (784,), "cnn": (1, 28, 28), "builtin-cnn": (1, 28, 28), "small": (64,)}
)


class MissingError(ImportError):
    """A device that is not here: the contender is left out, as one that is not installed."""


@dataclass(frozen=True)
class Work:
    """One federation: every client takes part in every round.

    Attributes:
        model: mlp (784-128-10), cnn (two convolutions, as usual for MNIST), builtin-cnn (fedsim's
            own `cnn`, with group norm) or small (64-32-10).
        clients: how many.
        private: DP-SGD on Poisson batches, and every client's epsilon after every round; else plain
            SGD.
    """

    model: str
    clients: int
    private: bool

    @property
    def examples(self) -> int:
        """Examples of a client."""
        return 32 if self.model == "small" else 300

    @property
    def batch(self) -> int:
        """Examples of a batch, or expected in a batch."""
        return 8 if self.model == "small" else 32

    steps = 4
    lr = 0.1
    noise_multiplier = 1.0
    max_grad_norm = 0.5
    delta = 1e-3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example's features."""
        return SHAPES[self.model]

    def data(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return all clients' examples, client after client."""
        generator = np.random.default_rng(seed)
        n = self.clients * self.examples
        x = generator.standard_normal((n, *self.shape), dtype=np.float32)
        return x, generator.integers(0, 10, n)

    def save_data(self, folder: Path) -> None:
        """Write all clients' examples to x.npy and y.npy, where other processes find them."""
        for name, values in zip("xy", self.data(), strict=True):
            np.save(folder / f"{name}.npy", values)

    @property
    def megabytes(self) -> float:
        """Size of all clients' examples."""
        return self.clients * self.examples * float(np.prod(self.shape)) * 4 / 2**20

    def build(self) -> nn.Module:
        """Return the model."""
        torch.manual_seed(0)
        if self.model == "builtin-cnn":
            return _builtin_cnn(self.shape)
        if self.model == "cnn":
            return nn.Sequential(
                nn.Conv2d(1, 16, 8, 2, padding=3),
                nn.ReLU(),
                nn.MaxPool2d(2, 1),
                nn.Conv2d(16, 32, 4, 2),
                nn.ReLU(),
                nn.MaxPool2d(2, 1),
                nn.Flatten(),
                nn.Linear(512, 32),
                nn.ReLU(),
                nn.Linear(32, 10),
            )
        hidden = 32 if self.model == "small" else 128
        return nn.Sequential(nn.Linear(self.shape[0], hidden), nn.ReLU(), nn.Linear(hidden, 10))


class Contender(ABC):
    """Does the rounds of some work.

    Attributes:
        name: as printed.
    """

    name: str

    @abstractmethod
    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""

    @abstractmethod
    def round(self) -> None:
        """Do one round: every client trains, the server averages."""

    def close(self) -> None:
        """Give back what `prepare` took."""
        return None


def _builtin_cnn(shape: tuple[int, ...]) -> nn.Module:
    """Return fedsim's `cnn` with its default settings; ImportError where fedsim is missing."""
    from fedsim.models.build import cnn
    from fedsim.models.catalog import CnnArgs

    return cnn(CnnArgs(), shape, 10)


def check_device(device: str) -> None:
    """Check that torch has a device.

    Raises:
        MissingError: torch finds no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("no GPU: torch.cuda.is_available() is False")
