"""Functions of torch that noise and clipping are computed with, as they were before any plug-in.

A plug-in that replaces one, such as `torch.linalg.vector_norm`, changes the mechanism of every
client: its norms need no longer be norms.
"""

import sys
from collections.abc import Iterator
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType

_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_IN_PYTHON = ("torch._tensor", "torch.functional")


@cache
def original_functions() -> dict[str, object]:
    """Return torch's functions by name, as they were at the first call: before any plug-in."""
    return dict(_functions())


def replaced_functions() -> list[str]:
    """Return the names of functions that are no longer the original ones."""
    if "torch" not in sys.modules:
        return []
    now = dict(_all())
    return [name for name, value in original_functions().items() if now.get(name) != value]


def _functions() -> Iterator[tuple[str, object]]:
    for name, value in _all():
        is_python = isinstance(value, FunctionType) and value.__module__ in _IN_PYTHON
        if is_python or isinstance(value, _IN_C):
            yield name, value


def _all() -> Iterator[tuple[str, object]]:
    import torch

    for owner in (torch, torch.linalg, torch.Tensor):
        prefix = "torch" if owner is torch else f"torch.{owner.__name__.rpartition('.')[2]}"
        own = dict.fromkeys([*vars(owner), *(dir(owner) if isinstance(owner, type) else ())])
        yield from ((f"{prefix}.{name}", getattr(owner, name)) for name in own)
