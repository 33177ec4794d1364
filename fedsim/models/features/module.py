"""A trained model behind the transforms of its experiment, for inputs as the dataset has them."""

import torch
from torch import Tensor, nn

from fedsim.models.features.pipeline import FeaturePipeline


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
