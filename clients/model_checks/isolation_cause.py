"""The likely cause of a coupling: the first layer whose output mixes two examples."""

from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.model_checks.isolation_probe import Probe, ProbeLot, rows
from fedsim.clients.model_checks.safety import find_batch_norm


def likely_cause(probe: Probe, lot: ProbeLot, other: ProbeLot, i: int) -> str:
    """Return the likely cause of a coupling, and the fix.

    Args:
        probe: the model and the loss.
        lot: some examples.
        other: the lot with another example replaced, or example i alone.
        i: index of the example whose gradient changed.
    """
    normalised = find_batch_norm(probe.model)
    if normalised is not None:
        name, module = normalised
        return (
            f"layer {name!r} ({type(module).__name__}) normalises over the batch; replace it by "
            f"nn.GroupNorm(num_groups, {module.num_features}) or nn.LayerNorm"
        )
    place = 0 if len(other) == 1 else i
    before, after = _traces(probe, lot), _traces(probe, other)
    tolerance = 1e-6 if len(other) == len(lot) else 1e-3
    for (name, one), (_, two) in zip(before, after, strict=False):
        if _differ(one, i, two, place, tolerance):
            module = probe.model.get_submodule(name)
            where = f"layer {name!r} ({type(module).__name__})" if name else "the model's forward"
            return (
                f"{where} mixes the examples of a batch; compute for each example alone, along "
                "other dimensions than the first"
            )
    return (
        "the loss mixes the examples of a batch; return one value per example, as with "
        "reduction='none', and divide by nothing that depends on the other examples (their "
        "number, their class weights, how many labels are ignored)"
    )


def _traces(probe: Probe, lot: ProbeLot) -> list[tuple[str, list[Tensor]]]:
    """Return the name and outputs of every layer, in the order in which the layers end."""
    found: list[tuple[str, list[Tensor]]] = []
    hooks = []
    for name, module in probe.model.named_modules():

        def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            found.append((name, [value.detach().clone() for value in rows(output, len(lot))]))

        hooks.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            probe.outputs(lot)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _differ(one: list[Tensor], i: int, two: list[Tensor], k: int, tolerance: float) -> bool:
    return any(
        a[i].shape == b[k].shape and not bool((a[i] - b[k]).norm() <= tolerance * a[i].norm())
        for a, b in zip(one, two, strict=False)
    )
