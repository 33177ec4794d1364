"""Public initial weights from a file, and parts of a model that stay as they are."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsim.models.catalog import ModelError

_MAX_NAMES = 8


def load_initial_weights(model: nn.Module, path: Path) -> None:
    """Overwrite the values of a model by those of a safetensors file of the same names.

    The file may lack values of the model, such as a new last layer; these stay as they are. It may
    hold none that the model lacks.

    Args:
        model: the model.
        path: the file; nothing in it is executed.

    Raises:
        ModelError: the file cannot be read, or one of its tensors does not fit; the message names
            the tensor.
    """
    values = _read(path)
    own = model.state_dict()
    if not values:
        raise ModelError(f"model.init: {path} holds no tensors")
    for name, value in values.items():
        _check(name, value, own, path)
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training: they get no gradient, no noise, and no update.

    Args:
        model: the model.
        patterns: shell patterns of parameter names, such as `features.*`.

    Raises:
        ModelError: a pattern is of no parameter, or no parameter remains to be trained.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ModelError(
                f"model.freeze: {pattern!r} is no parameter of the model{_hint(pattern, named)}"
            )
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad and parameter.numel() for parameter in named.values()):
        raise ModelError(
            "model.freeze: all parameters of the model are frozen, so nothing is trained; remove a "
            "pattern"
        )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model.init: {path} cannot be read as safetensors: {reason}; write it with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from error


def _check(name: str, value: Tensor, own: Mapping[str, Tensor], path: Path) -> None:
    if name not in own:
        raise ModelError(
            f"model.init: tensor {name!r} of {path} is not in the model{_hint(name, own)}; remove "
            "it from the file, or rename it"
        )
    expected = own[name]
    if value.shape != expected.shape:
        raise ModelError(
            f"model.init: tensor {name!r} of {path} has shape {tuple(value.shape)}, and the model "
            f"has {tuple(expected.shape)}"
        )
    if value.dtype != expected.dtype:
        raise ModelError(
            f"model.init: tensor {name!r} of {path} has type {_dtype(value)}, and the model has "
            f"{_dtype(expected)}; convert it before you save it"
        )
    if value.is_floating_point() and not value.isfinite().all():
        raise ModelError(f"model.init: tensor {name!r} of {path} holds NaN or infinity")


def _hint(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    names = list(known)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"; it has {', '.join(names[:_MAX_NAMES])}{more}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
