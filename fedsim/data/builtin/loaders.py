"""The function that loads each built-in dataset."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fedsim.data.builtin.cifar import load_cifar10
from fedsim.data.builtin.context import LoadContext
from fedsim.data.builtin.hugging_face import load_hugging_face
from fedsim.data.builtin.mnist import load_emnist, load_fashion_mnist, load_mnist
from fedsim.data.builtin.scikit import TABLES, load_digits, load_table
from fedsim.data.builtin.synthetic import (
    load_blobs,
    load_synthetic_fedprox,
    load_synthetic_logistic,
)
from fedsim.data.conversion import Dataset

Loader = Callable[[Any, LoadContext], Dataset]


def _table(name: str) -> Loader:
    return lambda args, context: load_table(name, args)


LOADERS: Mapping[str, Loader] = MappingProxyType(
    {
        "digits": lambda args, context: load_digits(),
        **{name: _table(name) for name in TABLES},
        "mnist": load_mnist,
        "fashion_mnist": load_fashion_mnist,
        "emnist": load_emnist,
        "cifar10": load_cifar10,
        "huggingface": load_hugging_face,
        "synthetic_fedprox": load_synthetic_fedprox,
        "synthetic_logistic": load_synthetic_logistic,
        "blobs": load_blobs,
    }
)
