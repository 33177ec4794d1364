"""Choice of the device on which clients train."""

from typing import Literal

import torch

from fedsim.core.errors import InputError


class DeviceError(InputError):
    """The requested device does not exist on this machine."""


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of a setting; `auto` is CUDA if the machine has it, else the CPU.

    Raises:
        DeviceError: the setting is `cuda` and the machine has no CUDA device.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError(
            "runtime.device: cuda, but this machine has no CUDA device; use auto or cpu"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")
