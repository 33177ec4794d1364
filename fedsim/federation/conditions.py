"""Digest of the conditions of training: settings, plug-in sources, versions and device.

The conditions are the same for all clients and rounds of a run. A client repeats its answer in a
round only under the same conditions (`clients/account.py`).
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import fedsim
from fedsim.core.errors import InputError
from fedsim.core.plugin_sources import PluginSources, read_sources
from fedsim.core.plugins import PluginError
from fedsim.data import Examples
from fedsim.experiment import Experiment


def plugin_sources(experiment: Experiment, base: Path) -> PluginSources:
    """Return the recorded sources of the plug-ins that the experiment names.

    Args:
        experiment: the settings.
        base: the directory in which relative paths start.

    Raises:
        PluginError: the file of a plug-in cannot be read.
    """
    try:
        return read_sources(experiment.plugins, base=base)
    except OSError as error:
        raise PluginError(f"cannot read {error.filename}: {error.strerror}") from error


def refuse_edited_plugins(before: PluginSources, experiment: Experiment, base: Path) -> None:
    """Check that the sources of plug-ins have not changed since they were recorded.

    Args:
        before: the sources as recorded at the start of the run.
        experiment: the settings.
        base: the directory in which relative paths start.

    Raises:
        PluginError: a file or an installed package of a plug-in has changed.
    """
    entries, now = before.entries, plugin_sources(experiment, base).entries
    for name in [*entries, *(name for name in now if name not in entries)]:
        if entries.get(name) != now.get(name):
            raise PluginError(
                f"the {name} changed while the experiment was loaded or ran: restore it to go on, "
                "or start a new run"
            )


def digest_conditions(experiment: Experiment, sources: str, device: torch.device) -> str:
    """Return the digest of the conditions of a run in this process.

    Args:
        experiment: the settings; the paths of data files are left out, as each client's examples
            have their own digest.
        sources: the digest of the plug-ins' sources.
        device: the device that trains.
    """
    settings = experiment.model_dump(mode="json", include={"data", "model", "local", "privacy"})
    if isinstance(settings["data"]["dataset"], dict):
        for place in ("path", "test"):
            del settings["data"]["dataset"][place]
    if experiment.data.folder is not None:
        del settings["data"]["args"]["path"]
    versions = (fedsim.__version__, torch.__version__, np.__version__)
    content = [settings, sources, *versions, device_kind(device)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def device_kind(device: torch.device) -> str:
    """Return a text for a device's hardware; devices with equal texts train to the same bits."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def digest_examples(examples: Examples) -> bytes:
    """Return the digest of a client's examples; treat the digest as private, like the examples."""
    state = hashlib.blake2b(digest_size=32)
    for array in (examples.features, examples.targets):
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return state.digest()


class DeviceError(InputError):
    """Error of a requested device that this machine does not have."""


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device that `runtime.device` names; `auto` is CUDA if available, else the CPU.

    Raises:
        DeviceError: the setting is `cuda` and the machine has no CUDA device.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError(
            "runtime.device: cuda, but this machine has no CUDA device; use auto or cpu"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")
