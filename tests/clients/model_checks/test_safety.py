import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.model_checks.safety import UnsafeModelError, check_private_model

IMAGES = torch.ones(3, 4, 5, 5)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x.mean((2, 3)))


class EvalNorm(nn.Sequential):
    """Batch normalisation with frozen statistics: per example, hence allowed."""

    def train(self, mode: bool = True) -> "EvalNorm":
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.BatchNorm2d(4)),
            r"layer '0' \(BatchNorm2d\).*GroupNorm\(num_groups, 4\)",
        ),
        (nn.Sequential(nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4))), "layer '1.0'"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
        (Counting(), "buffer 'seen' changes in forward"),
        (
            nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(100, 2))),
            "changes in forward",
        ),
    ],
)
def test_unsafe_models_are_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsafeModelError, match=message):
        check_private_model(model, IMAGES)


@pytest.mark.parametrize(
    "model",
    [
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.LayerNorm([4, 5, 5]),
        nn.Dropout(0.5),
        EvalNorm(nn.BatchNorm2d(4)),
    ],
)
def test_safe_models_pass_unchanged(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    check_private_model(model, IMAGES)
    assert not model.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_the_check_restores_buffers_and_never_sees_data() -> None:
    class Recorder(Counting):
        def forward(self, x: Tensor) -> Tensor:
            assert not x.any(), "the check must run on zeros, not on examples"
            return super().forward(x)

    model = Recorder()
    with pytest.raises(UnsafeModelError):
        check_private_model(model, IMAGES)
    assert model.seen == 0
