"""The function that loads each built-in dataset."""

from collections.abc import Callable, Mapping
from typing import Any

from fedsim.core.imports import ByName
from fedsim.data.builtin.context import LoadContext
from fedsim.data.conversion import Dataset

LOADERS: Mapping[str, Callable[[Any, LoadContext], Dataset]] = ByName(
    {
        "digits": "fedsim.data.builtin.scikit:load_digits",
        "iris": "fedsim.data.builtin.scikit:load_iris",
        "wine": "fedsim.data.builtin.scikit:load_wine",
        "breast_cancer": "fedsim.data.builtin.scikit:load_breast_cancer",
        "diabetes": "fedsim.data.builtin.scikit:load_diabetes",
        "linnerud": "fedsim.data.builtin.scikit:load_linnerud",
        "mnist": "fedsim.data.builtin.mnist:load_mnist",
        "fashion_mnist": "fedsim.data.builtin.mnist:load_fashion_mnist",
        "emnist": "fedsim.data.builtin.mnist:load_emnist",
        "cifar10": "fedsim.data.builtin.cifar:load_cifar10",
        "huggingface": "fedsim.data.builtin.hugging_face:load_hugging_face",
        "synthetic_fedprox": "fedsim.data.builtin.synthetic:load_synthetic_fedprox",
        "synthetic_logistic": "fedsim.data.builtin.synthetic:load_synthetic_logistic",
        "blobs": "fedsim.data.builtin.synthetic:load_blobs",
    }
)
