"""Check on data that no example's gradient depends on another example.

Book-keeping, and every loop that calls `loss.backward()` on a batch, passes examples through the
model together. Clipping bounds an example's influence only if it reaches no gradient but its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.clients.model_checks.isolation_probe import Probe, ProbeLot, lots_to_compare, rows
from fedsim.clients.model_checks.safety import UnsafeModelError, find_batch_norm, preserve_state

Loss = Callable[[Tensor, Tensor], Tensor]

_MAX_EXAMPLES = 4  # each pair of examples costs backward passes


def check_isolation(model: nn.Module, loss: Loss, features: Tensor, targets: Tensor) -> None:
    """Check on data that no example's gradient depends on another example.

    In train mode, with the same random numbers each time, each example is replaced by other values;
    the gradients and outputs of the others must not change. The gradient of an example alone must
    equal that in the batch, in eval mode if the model draws random numbers. Both are checked twice,
    with the initial parameters and with others close to them: zero weights could hide a coupling.

    Args:
        model: the model as it will be trained.
        loss: maps outputs and targets (n, ...) to one loss per example; or to their sum or mean,
            which must then be a sum over examples with factors that do not depend on them.
        features: at least 2 public or synthetic examples (n, ...), never private ones. They should
            differ, and include possible causes of a coupling (ignored labels, rare classes). The
            first 4 are used.
        targets: their targets (n, ...).

    Guarantee:
        parameters, buffers, modes and global random generators are restored.

    Raises:
        UnsafeModelError: examples are coupled (the message names the first two, the likely cause
            and the fix), or the model or the loss fails on one example alone.
        ValueError: fewer than 2 examples.

    Edge cases:
        a coupling that is absent on these examples, or within rounding, is not found.
    """
    if len(features) < 2 or len(features) != len(targets):
        raise ValueError(
            f"the isolation check needs at least 2 examples with targets, got {len(features)} "
            f"examples and {len(targets)} targets"
        )
    lot = ProbeLot(features[:_MAX_EXAMPLES], targets[:_MAX_EXAMPLES])
    with preserve_state(model), torch.enable_grad():
        model.train()
        probe = Probe(model, loss)
        for _ in _at_two_points(probe.parameters):
            _check(probe, lot)


def _check(probe: Probe, lot: ProbeLot) -> None:
    if not probe.is_repeatable(lot):
        # The model draws random numbers from elsewhere; eval mode may draw none.
        probe.use_eval_mode()
        if not probe.is_repeatable(lot):
            raise UnsafeModelError(
                "the model gives other gradients for the same examples and the same torch seed, "
                "so it cannot be checked that examples are kept apart; draw random numbers with "
                "torch"
            )
    _check_replaced(probe, lot)
    if probe.is_random(lot):
        probe.use_eval_mode()
    _check_alone(probe, lot)
    probe.use_train_mode()


def _check_replaced(probe: Probe, lot: ProbeLot) -> None:
    for j, other in lots_to_compare(lot):
        i = probe.first_moved_example(lot, other, j)
        if i is not None:
            raise UnsafeModelError(
                f"example {i} is coupled to example {j}: its gradient changes when example {j} "
                f"is replaced by another; {likely_cause(probe, lot, other, i)}"
            )


def _check_alone(probe: Probe, lot: ProbeLot) -> None:
    i = probe.first_different_alone(lot)
    if i is not None and probe.is_random(lot):
        raise UnsafeModelError(
            "the model's forward draws random numbers in evaluation mode, too, so an example alone "
            "cannot be compared with the same example in a batch; draw them only if self.training "
            "is true, as nn.Dropout does, or put the noise into the data"
        )
    if i is not None:
        j = 0 if i else 1
        raise UnsafeModelError(
            f"example {i} is coupled to example {j}: its gradient is another one in a batch than "
            f"alone; {likely_cause(probe, lot, lot.only(i), i)}"
        )


def _at_two_points(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Yield at the parameters' values, then at values close to them, and restore them."""
    yield
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                size = parameter.square().mean().sqrt() + 0.3 / max(1, parameter[:1].numel()) ** 0.5
                parameter.add_(noise * size, alpha=0.2)
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


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
