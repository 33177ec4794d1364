"""The model of experiment.yaml: a function that returns an nn.Module."""

from torch import Tensor, nn


class Network(nn.Module):
    """Two fully connected layers.

    DP-SGD needs the gradient of each example alone. So no layer may mix examples: use GroupNorm or
    LayerNorm in place of BatchNorm. test_model.py checks this.
    """

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),  # images (batch, channels, height, width) become (batch, inputs)
            nn.Linear(inputs, hidden),
            nn.Tanh(),
            nn.Linear(hidden, classes),
        )

    def forward(self, examples: Tensor) -> Tensor:
        """Return one score for each class, (batch, classes)."""
        return self.layers(examples)


def build(inputs: int = 64, hidden: int = 32, classes: int = 10) -> nn.Module:
    """Return the model; the arguments come from `model.args` in experiment.yaml."""
    return Network(inputs, hidden, classes)
