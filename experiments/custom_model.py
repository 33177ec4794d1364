"""A model of one's own: any callable that returns an nn.Module for a batch of inputs."""

import torch
from torch import Tensor, nn


class ResidualNet(nn.Module):
    """Two fully connected layers with a skip connection, normalised per example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.norm = nn.LayerNorm(width)  # BatchNorm would mix examples, and is refused
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores (batch, 10) of images (batch, 1, 8, 8)."""
        hidden = torch.relu(self.norm(self.embed(images.flatten(1))))
        return self.head(hidden + torch.relu(self.block(hidden)))


def build(width: int = 32) -> nn.Module:
    """Return the model; `width` comes from `model.args` in the experiment file."""
    return ResidualNet(width)


def smooth_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy with label smoothing, one value per example."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.05)
