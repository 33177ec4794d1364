"""The transforms of an experiment, applied to all examples, or in front of a trained model."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data.examples import DataError
from fedsim.models.catalog import ModelError
from fedsim.models.features.settings import FeatureSettings
from fedsim.models.features.shapes import Shape, shape_after
from fedsim.models.features.transforms import Transform, make_transform


class FeaturePipeline:
    """Fixed transforms of one example, in order.

    Guarantee: the features of an example are a function of that example and public constants. Each
    is computed alone, so other examples change no bit of them.

    Args:
        features: `model.features`.
    """

    def __init__(self, features: Sequence[FeatureSettings]) -> None:
        self._features = tuple(features)

    def output_shape(self, input_shape: Shape) -> Shape:
        """Return the shape of one example's features.

        Args:
            input_shape: shape of one example in the dataset.

        Raises:
            ModelError: a transform does not take examples of that shape.
        """
        return shape_after(self._features, input_shape) or ()

    def __call__(self, examples: NDArray[np.float32] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features (n, *output_shape) of examples (n, *input_shape).

        Raises:
            ModelError: a transform does not take examples of that shape, or tokens.
            DataError: a feature is no finite float32 number.
        """
        shape = examples.shape[1:]
        if examples.dtype != np.float32:
            raise ModelError(
                "model.features takes numbers, and data.features: tokens gives positions of an "
                "embedding; remove one of them"
            )
        result = np.empty((len(examples), *self.output_shape(shape)), np.float32)
        transforms = self._transforms(shape)
        with np.errstate(all="ignore"):  # checked below
            for index, example in enumerate(examples):
                value = example.astype(np.float64)
                for transform in transforms:
                    value = transform(value)
                result[index] = value
        _check_finite(result)
        return result

    def _transforms(self, shape: Shape) -> list[Transform]:
        transforms: list[Transform] = []
        for position, one in enumerate(self._features):
            before = shape_after(self._features[:position], shape) or ()
            transforms.append(make_transform(one.name, one.value, before))
        return transforms


def _check_finite(features: NDArray[np.float32]) -> None:
    wrong = np.flatnonzero(~np.isfinite(features.reshape(len(features), -1)).all(axis=1))
    if wrong.size:
        raise DataError(
            f"model.features: the features of {wrong.size} of {len(features)} examples are no "
            f"finite float32 numbers, first of example {wrong[0]}; change the constants"
        )


class FeatureModel(nn.Module):
    """A model that transforms its inputs first. No gradient reaches the inputs.

    Args:
        features: the fixed transforms.
        model: takes the features (n, ...).
    """

    def __init__(self, features: FeaturePipeline, model: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the model for inputs (n, ...) of the dataset's shape.

        Raises:
            ModelError: a transform does not take inputs of that shape.
            DataError: a feature is no finite number.
        """
        numbers = x.detach().to("cpu", torch.float32).contiguous().numpy()
        return self.model(torch.from_numpy(self.features(numbers)).to(x.device))
