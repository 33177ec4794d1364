"""Checks, run on a few examples, that no example's gradient depends on another example.

Clipping bounds the influence of an example only if the example changes no gradient of another
example. A loop that calls `loss.backward()` on a batch passes all its examples through the model
together, so a layer such as batch normalization may mix them. The checks compute gradients and
outputs of the same examples in two batches that differ in the other examples, and compare them.

Each gradient costs a backward pass, so one weighted sum of them is compared first. Its weights are
different powers of two, after each gradient is scaled to a norm of about 1, so that a change of one
example shows, and changes of several do not cancel. Only if the sum changes, or where a gradient is
about zero, the gradients of single examples are compared.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsim.clients.model_checks.safety import UnsafeModelError, find_batch_norm, preserve_state

_SEED = 20240229
_LEAST_NORM = 0.5  # of a gradient times its weight
_LEAST_SEEN = 1e-30  # norm of a gradient whose weight is a float32


@dataclass(frozen=True)
class ProbeBatch:
    """Batch of a few examples, on which a model is checked.

    Attributes:
        features: features of the examples (n, ...).
        targets: targets of the examples (n, ...).
    """

    features: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.features)

    def only(self, i: int) -> "ProbeBatch":
        """Return the batch that has example i of this batch as its only example."""
        return ProbeBatch(self.features[i : i + 1], self.targets[i : i + 1])

    def replaced(self, j: int, features: Tensor, targets: Tensor) -> "ProbeBatch":
        """Return the batch with example j replaced by another example.

        Args:
            j: index of the example to replace.
            features: features of the new example (...).
            targets: targets of the new example (...).
        """
        x, y = self.features.clone(), self.targets.clone()
        x[j], y[j] = features, targets
        return ProbeBatch(x, y)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's random generator of a device.

    Args:
        seed: the seed.
        device: device whose generator is seeded.
    """
    if device.type == "cpu":  # torch.manual_seed records its caller, which is slow
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def batches_to_compare(batch: ProbeBatch) -> Iterator[tuple[int, ProbeBatch]]:
    """Yield pairs (j, the batch with example j replaced), for each example j of the batch.

    Example j is replaced by another example of the batch, and, if features are floats, by large
    values.
    """
    generator = torch.Generator().manual_seed(_SEED)
    x, y = batch.features, batch.targets
    for j in range(len(batch)):
        k = (j + 1) % len(batch)
        yield j, batch.replaced(j, x[k], y[k])
        if x.is_floating_point():
            noise = torch.randn(x[j].shape, generator=generator).to(x)
            yield j, batch.replaced(j, (noise - 3.0) * x.abs().mean().clamp(min=1e-3), y[j])


@dataclass(frozen=True)
class _Seen:
    """Results of a pass over a batch: outputs with one row per example, and gradients.

    Attributes:
        batch: the batch.
        outputs: outputs, each with one row per example.
        gradients: flat gradient (size,) of each loss.
        weights: weight of each gradient in a sum, a power of two; 0 if it is about zero or not
            finite.
    """

    batch: ProbeBatch
    outputs: list[Tensor]
    gradients: list[Tensor]
    weights: list[float]


class Probe:
    """Runner of a model on small batches, with the same random numbers each time.

    Args:
        model: the model.
        loss: function of (outputs, targets) that returns one value per example, or a single value.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.loss = model, loss
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        eps = max(torch.finfo(p.dtype).eps for p in self.parameters)
        # Batches of one shape run the same kernels, so rows that are not coupled hardly change
        # (7e-5 in float32). Other sizes round differently, more so in deep models (2e-3).
        self._tolerance_same_shape: float = eps**0.6
        self.tolerance_other_shape: float = 30 * eps**0.6

    def outputs(self, batch: ProbeBatch, seed: int = _SEED) -> Any:
        """Return the model's outputs on a batch, after seeding the random generators.

        Args:
            batch: the batch of n examples.
            seed: seed of the model's random numbers.
        """
        seed_torch(seed, batch.features.device)
        random.seed(seed)
        return self.model(batch.features)

    def losses(self, batch: ProbeBatch, seed: int = _SEED) -> Tensor:
        """Return the loss of each example (n,), or a scalar if the loss is one value per batch.

        Args:
            batch: the batch of n examples.
            seed: seed of the model's random numbers.
        """
        return self._losses_of(self.outputs(batch, seed), batch)

    def _losses_of(self, outputs: Any, batch: ProbeBatch) -> Tensor:
        values = self.loss(outputs, batch.targets)
        if not isinstance(values, Tensor):
            kind = type(values).__name__
            raise UnsafeModelError(f"the loss must return a tensor at every call, got {kind}")
        if values.ndim == 0:
            return values
        if len(values) != len(batch):
            raise UnsafeModelError(
                f"the loss returned shape {tuple(values.shape)} for {len(batch)} examples, so its "
                "values cannot be told apart by example; return one value per example, as with "
                "reduction='none'"
            )
        return values.flatten(1).sum(1) if values.ndim > 1 else values

    def gradients(self, batch: ProbeBatch, seed: int = _SEED) -> list[Tensor]:
        """Return a list with the flat gradient (size,) of each example's loss.

        If the loss is a single value for the batch, the list has only the gradient of this value.

        Args:
            batch: the batch of n examples.
            seed: seed of the model's random numbers.
        """
        return self._gradients_of(self.losses(batch, seed))

    def see(self, batch: ProbeBatch) -> _Seen:
        """Return the results of a pass over a batch, in the model's current mode."""
        outputs = self.outputs(batch)
        kept = [value.detach().clone() for value in rows(outputs, len(batch))]
        gradients = self._gradients_of(self._losses_of(outputs, batch))
        return _Seen(batch, kept, gradients, _weights(gradients))

    def is_repeatable(self, seen: _Seen) -> bool:
        """Return whether another pass on the batch with the same seed gives the same gradients."""
        if not any(bool(g.isfinite().all()) for g in seen.gradients):
            raise UnsafeModelError(
                "the gradients of the examples are not finite, so it cannot be checked that "
                "examples are kept apart; scale the features or check the model"
            )
        return self._first_changed(seen, self.losses(seen.batch)) is None

    def is_random(self, seen: _Seen) -> bool:
        """Return whether the gradients depend on the random seed."""
        return self._first_changed(seen, self.losses(seen.batch, _SEED + 1)) is not None

    def first_moved_example(self, seen: _Seen, other: ProbeBatch, j: int) -> int | None:
        """Return the index of the first example whose results differ between two batches.

        Results are outputs and gradients. If they are equal for all examples, return None.

        Args:
            seen: results of a batch.
            other: the same batch with example j replaced.
            j: index of the replaced example, which is skipped.
        """
        batch, outputs = seen.batch, self.outputs(other)
        others = [i for i in range(len(batch)) if i != j]
        pairs = zip(seen.outputs, rows(outputs, len(batch)), strict=False)
        moved = [self._far_rows(before, after.detach()) for before, after in pairs]
        first = next((i for i in others if any(far[i] for far in moved)), None)
        if first is not None:
            return first
        losses = self._losses_of(outputs, other)
        if losses.ndim:
            return self._first_changed(seen, losses, others)
        before, after = seen.gradients[0], self._gradient(losses)
        changed = (i for i in others if self._not_additive(batch, other, i, before, after))
        return next(changed, None)

    def _first_changed(
        self,
        seen: _Seen,
        losses: Tensor,
        places: Sequence[int] | None = None,
        *,
        tolerance: float | None = None,
        slack: float = 0.0,
    ) -> int | None:
        """Return the first of some places at which a gradient changed by more than rounding.

        Args:
            seen: results of a batch.
            losses: losses (n,) or a scalar, like those of this batch.
            places: the places to compare; None for all.
            tolerance: largest change of a gradient by rounding, relative to its norm; by default
                that of batches of one shape.
            slack: norm that is added to that of each gradient.
        """
        losses = losses.reshape(-1)
        if places is None:
            places = range(min(len(losses), len(seen.gradients)))
        tolerance = self._tolerance_same_shape if tolerance is None else tolerance
        if self._sums_agree(seen, losses, places, tolerance):
            places = [i for i in places if not seen.weights[i]]
        for i in places:
            before = seen.gradients[i]
            if bool(before.isfinite().all()):
                change = before - self._gradient(losses[i])
                if not bool(change.norm() <= tolerance * (before.norm() + slack)):
                    return i
        return None

    def _sums_agree(
        self, seen: _Seen, losses: Tensor, places: Sequence[int], tolerance: float
    ) -> bool:
        """Return whether the weighted sum of some gradients is the one seen, within rounding.

        A change of one example by `tolerance`, relative to its gradient, is not within rounding.

        Args:
            seen: results of a batch.
            losses: losses (n,) like those of this batch.
            places: the places of the gradients in the sum; the others are left out.
            tolerance: largest change of a single gradient, relative to its norm.
        """
        places = [i for i in places if seen.weights[i]]
        if not places:
            return True
        index = torch.tensor(places, device=losses.device)
        weights = torch.tensor(
            [seen.weights[i] for i in places], dtype=torch.float32, device=losses.device
        )
        total = self._gradient((losses[index] * weights).sum())
        difference = total.to(torch.promote_types(total.dtype, weights.dtype))
        for i in places:
            difference.sub_(seen.gradients[i], alpha=seen.weights[i])
        return bool(difference.norm() <= _LEAST_NORM * tolerance)

    def _not_additive(
        self, batch: ProbeBatch, other: ProbeBatch, i: int, before: Tensor, after: Tensor
    ) -> bool:
        """Return whether replacing example i changes two batches' total gradients differently.

        Args:
            batch: the batch.
            other: the batch with another example replaced.
            i: index of the example.
            before: total gradient of `batch`.
            after: total gradient of `other`.
        """
        k = (i + 1) % len(batch)
        x, y = batch.features[k], batch.targets[k]
        left, right = (self.gradients(given.replaced(i, x, y))[0] for given in (batch, other))
        scale = torch.stack([before, after, left, right]).norm(dim=1).max()
        return bool(
            ((before - left) - (after - right)).norm() > 10 * self._tolerance_same_shape * scale
        )

    def first_different_alone(self, seen: _Seen) -> int | None:
        """Return the index of the first example whose gradient changes if it is alone in a batch.

        The result is None if there is no such example.

        Raises:
            UnsafeModelError: the model or the loss fails on one example alone.
        """
        try:
            return self._first_different_alone(seen)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UnsafeModelError(
                f"the model or the loss fails on one example alone ({error}), and batches may have "
                "any size; keep the first dimension for the examples, whatever their number"
            ) from error

    def _first_different_alone(self, seen: _Seen) -> int | None:
        batch, together = seen.batch, seen.gradients
        alone = [self.losses(batch.only(i)).reshape(-1)[0] for i in range(len(batch))]
        losses = torch.stack(alone)
        if len(together) > 1 or len(batch) == 1:
            tolerance, most = self.tolerance_other_shape, max(float(g.norm()) for g in together)
            return self._first_changed(seen, losses, tolerance=tolerance, slack=1e-3 * most)
        gradients = torch.stack(self._gradients_of(losses))
        total = gradients.sum(0)
        bound = self.tolerance_other_shape * gradients.norm(dim=1).sum()
        as_sum = (together[0] - total).norm() <= bound
        as_mean = (together[0] * len(batch) - total).norm() <= bound
        return None if bool(as_sum | as_mean) or not bool(total.isfinite().all()) else 0

    def _gradients_of(self, losses: Tensor) -> list[Tensor]:
        return [self._gradient(value) for value in (losses if losses.ndim else [losses])]

    def _gradient(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.cat([torch.zeros_like(p).flatten() for p in self.parameters])
        gradients = torch.autograd.grad(
            value, self.parameters, retain_graph=True, materialize_grads=True
        )
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _far_rows(self, before: Tensor, after: Tensor) -> list[bool]:
        """Return whether each row of two outputs (n, ...) differs by more than rounding."""
        shape = len(before), before[0].numel()
        far = before.isfinite().reshape(shape).all(1)
        if before.shape == after.shape:
            change, norms = (before - after).reshape(shape), before.reshape(shape).norm(dim=1)
            far &= ~(change.norm(dim=1) <= self._tolerance_same_shape * norms)
        return far.tolist()


def _weights(gradients: list[Tensor]) -> list[float]:
    """Return the weights of gradients in a sum; 0 where the norm is about 0 or not finite."""
    norms = [float(gradient.norm()) for gradient in gradients]
    return [
        math.ldexp(1.0, i % 4 - math.frexp(norm)[1]) if _LEAST_SEEN < norm < math.inf else 0.0
        for i, norm in enumerate(norms)
    ]


def rows(outputs: Any, n: int) -> list[Tensor]:
    """Return the tensors among a module's outputs that have one row per example.

    Args:
        outputs: tensors in any nesting of lists, tuples and mappings.
        n: number of examples.
    """
    return [
        value
        for value in pytree.tree_leaves(outputs)
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.ndim
        and len(value) == n
    ]


Loss = Callable[[Tensor, Tensor], Tensor]

_MAX_EXAMPLES = 4  # every pair of examples costs backward passes


def check_isolation(model: nn.Module, loss: Loss, features: Tensor, targets: Tensor) -> None:
    """Check on data that no example's gradient depends on another example.

    Two things are checked:

    - Each example is replaced by other values, in train mode, with the same random numbers each
      time. The gradients and outputs of the other examples must not change.
    - The gradient of an example alone must equal its gradient in the batch. This is done in eval
      mode if the model draws random numbers.

    Both checks are made with the initial parameters and with parameters close to them, because
    weights of zero could hide a coupling of examples.

    Args:
        model: the model as it will be trained.
        loss: function of outputs and targets (n, ...) that returns one loss per example, or the sum
            or mean of these losses. A weighted sum must have weights that do not depend on the
            examples.
        features: at least 2 public or synthetic examples (n, ...), never private ones. They should
            differ, and include possible causes of a coupling (ignored labels, rare classes). The
            first 4 are used.
        targets: targets of these examples (n, ...).

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
    batch = ProbeBatch(features[:_MAX_EXAMPLES], targets[:_MAX_EXAMPLES])
    with preserve_state(model), torch.enable_grad():
        model.train()
        probe = Probe(model, loss)
        for _ in _at_two_points(probe.parameters):
            _check(probe, batch)


def _check(probe: Probe, batch: ProbeBatch) -> None:
    seen = probe.see(batch)
    if not probe.is_repeatable(seen):
        # The model draws random numbers that torch's seed does not fix; eval mode may draw none.
        probe.model.eval()
        seen = probe.see(batch)
        if not probe.is_repeatable(seen):
            raise UnsafeModelError(
                "the model gives different gradients for the same examples and the same torch "
                "seed, so it cannot be checked that examples are kept apart; draw random numbers "
                "with torch"
            )
    for j, other in batches_to_compare(batch):
        i = probe.first_moved_example(seen, other, j)
        if i is not None:
            raise UnsafeModelError(
                f"example {i} is coupled to example {j}: its gradient changes when example {j} "
                f"is replaced by another; {likely_cause(probe, batch, other, i)}"
            )
    if probe.is_random(seen):
        probe.model.eval()
        seen = probe.see(batch)
    _check_alone(probe, seen)
    probe.model.train()


def _check_alone(probe: Probe, seen: _Seen) -> None:
    i = probe.first_different_alone(seen)
    if i is not None and probe.is_random(seen):
        raise UnsafeModelError(
            "the model's forward draws random numbers in evaluation mode, too, so an example alone "
            "cannot be compared with the same example in a batch; draw them only if self.training "
            "is true, as nn.Dropout does, or put the noise into the data"
        )
    if i is not None:
        batch, j = seen.batch, 0 if i else 1
        raise UnsafeModelError(
            f"example {i} is coupled to example {j}: its gradient in a batch differs from its "
            f"gradient alone; {likely_cause(probe, batch, batch.only(i), i)}"
        )


def _at_two_points(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Yield with the parameters' values, then with values close to them, and restore them."""
    yield
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                row = max(1, parameter.shape[1:].numel())
                size = parameter.square().mean().sqrt() + 0.3 / row**0.5
                parameter.add_(noise * size, alpha=0.2)
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


def likely_cause(probe: Probe, batch: ProbeBatch, other: ProbeBatch, i: int) -> str:
    """Return text that names the likely cause of a coupling between examples, and the fix.

    Args:
        probe: the model and the loss.
        batch: a batch of examples.
        other: the second batch: `batch` with an example other than i replaced, or example i alone.
        i: index of the example whose gradient differs between the two batches.
    """
    normalised = find_batch_norm(probe.model)
    if normalised is not None:
        name, module = normalised
        return (
            f"layer {name!r} ({type(module).__name__}) normalises over the batch; replace it by "
            f"nn.GroupNorm(num_groups, {module.num_features}) or nn.LayerNorm"
        )
    place = 0 if len(other) == 1 else i
    before, after = _traces(probe, batch), _traces(probe, other)
    tolerance = 1e-6 if len(other) == len(batch) else 1e-3
    for (name, outputs), (_, others) in zip(before, after, strict=False):
        if _differ(outputs, i, others, place, tolerance):
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


def _traces(probe: Probe, batch: ProbeBatch) -> list[tuple[str, list[Tensor]]]:
    """Return the name and outputs of every layer, in the order in which the layers finish."""
    traces: list[tuple[str, list[Tensor]]] = []
    hooks = []
    for name, module in probe.model.named_modules():

        def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            traces.append((name, [value.detach().clone() for value in rows(output, len(batch))]))

        hooks.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            probe.outputs(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return traces


def _differ(left: list[Tensor], i: int, right: list[Tensor], k: int, tolerance: float) -> bool:
    return any(
        a[i].shape == b[k].shape and not bool((a[i] - b[k]).norm() <= tolerance * a[i].norm())
        for a, b in zip(left, right, strict=False)
    )
