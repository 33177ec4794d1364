"""Most clients of a block: a function of the experiment, never of the machine."""

from typing import Literal

from torch import nn

_MAX_SMALL_CLIENTS, _MAX_LARGE_CLIENTS, _MAX_IMAGE_CLIENTS = 128, 16, 4
_MAX_SMALL_VALUES = 1 << 15
_MAX_BLOCK_VALUES = 1 << 24  # trainable values of all members: 64 MB in float32
_MIN_BLOCKS = 8  # of a round, so that workers stay in balance
_MIN_CLIENTS = 4
_SLOW_LAYERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.InstanceNorm2d, nn.RNNBase),
)


def block_size(
    model: nn.Module, num_values: int, participants: int, setting: int | Literal["auto", "off"]
) -> int:
    """Return the most clients of a block, for a model that can train in blocks.

    A step of one client in a block of K takes about F/K + c: the fixed cost F of starting each
    operation, and the arithmetic c of the client itself. Measured on an Intel Xeon, in µs: F = 640
    and c = 38 for a small MLP, F = 500 and c = 650 for 784-128-10. A CNN has c = 3,400, and blocks
    larger than 4 gain nothing.

    Args:
        model: the architecture.
        num_values: trainable values of the model.
        participants: clients of a round.
        setting: `local.cohort`; a number is returned as it is.
    """
    if setting == "off":
        return 1
    if setting != "auto":
        return setting
    if any(isinstance(module, _SLOW_LAYERS) for module in model.modules()):
        size = _MAX_IMAGE_CLIENTS
    else:
        size = _MAX_SMALL_CLIENTS if num_values <= _MAX_SMALL_VALUES else _MAX_LARGE_CLIENTS
    balanced = max(_MIN_CLIENTS, participants // _MIN_BLOCKS)
    return max(1, min(size, balanced, _MAX_BLOCK_VALUES // max(1, num_values)))
