"""Where clients train."""

from typing import Literal

import torch

from fedsim.core.errors import InputError


class DeviceError(InputError):
    """A device that was asked for and is not there."""


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that a setting names; `auto` is CUDA where there is one.

    Raises:
        DeviceError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError(
            "runtime.device: cuda, but this machine has no CUDA device; use auto or cpu"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")
