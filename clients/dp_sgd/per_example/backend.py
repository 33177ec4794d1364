"""Chooses how per-example gradients are computed: the fastest way that is right for a model."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.model_checks.isolation import check_isolation
from fedsim.clients.dp_sgd.model_checks.safety import UnsafeModelError, preserve_state
from fedsim.clients.dp_sgd.per_example.clipped_sum import (
    BookKeeping,
    LoopGradients,
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
    VmapGradients,
)
from fedsim.clients.dp_sgd.per_example.module_use import Unit
from fedsim.clients.dp_sgd.per_example.unit_layouts import possible_units
from fedsim.core.errors import FedsimError

logger = logging.getLogger(__name__)

GradientMode = Literal["auto", "book_keeping", "vmap", "loop"]

_TRIED = 3  # and one less: two sizes, so that no fixed dimension can pass for the examples
# What a model may raise when it is run in a way that it was not written for.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class BackendError(FedsimError, RuntimeError):
    """The chosen way of computing per-example gradients is not right for a model."""


def gradients_for(
    model: nn.Module,
    loss: PerExampleLoss,
    features: Tensor,
    targets: Tensor,
    *,
    mode: GradientMode = "auto",
) -> PerExampleGradients:
    """Return book-keeping where it is right, else vmap where it works, else the loop.

    Book-keeping is tried on the given examples and compared, example by example, with gradients
    computed alone, for lots of two sizes; layers that it has no rule for are run as units. A model
    or a loss that couples examples (`check_isolation`) gets vmap or the loop, where every example
    is alone. The choice is logged where it is not plain book-keeping.

    Args:
        model: its trainable parameters become views of one flat tensor.
        loss: one value per example.
        features: a few public or synthetic examples (n ≥ 1, ...), never private ones: which way
            is chosen must not depend on private data.
        targets: their targets.
        mode: the way to take; "auto" chooses.

    Guarantee:
        the model's values, buffers and modes and the global random generators are unchanged.

    Raises:
        BackendError: the way asked for is not right for the model.
    """
    exact = LoopGradients(model, loss)
    if mode == "loop":
        return exact
    x, y = _several(features, targets)
    with preserve_state(model):
        if mode in ("auto", "book_keeping"):
            try:
                return _book_keeping(exact, x, y)
            except (UnsafeModelError, BackendError) as error:
                if mode == "book_keeping":
                    raise BackendError(f"not right for this model: {error}") from error
                logger.info("per-example gradients: not by book-keeping, because %s", error)
        model.eval()
        vectorised = VmapGradients(model, loss, parameters=exact.parameters)
        reason = _difference(vectorised, exact, x, y)
    if reason is None:
        return vectorised
    if mode == "vmap":
        raise BackendError(f"not right for this model: {reason}")
    logger.info("per-example gradients: one example at a time, because by vmap %s", reason)
    return exact


def _several(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return as many examples as are tried; repeated ones are moved a little if they can be."""
    if len(features) == 0:
        raise ValueError("the choice of a backend needs at least one public example, got none")
    index = torch.arange(_TRIED, device=features.device) % len(features)
    x, y = features[index].clone(), targets[index.to(targets.device)]
    if x.is_floating_point() and len(features) < _TRIED:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape, generator=generator).to(x)
        x[len(features) :] += 0.1 * (x.std() + 0.1) * noise[len(features) :]
    return x, y


def _book_keeping(exact: LoopGradients, x: Tensor, y: Tensor) -> BookKeeping:
    """Return book-keeping that agrees with gradients computed alone, with units where needed.

    Raises:
        UnsafeModelError: the model or the loss couples examples.
        BackendError: there is none.
    """
    model, loss = exact.model, exact.loss
    check_isolation(model, loss, x, y)
    model.eval()  # dropout would draw different masks for a lot and for one example
    units = _Units(exact, x)
    while True:
        fast = BookKeeping(model, loss, parameters=exact.parameters, units=units.chosen)
        try:
            reason = _difference(fast, exact, x, y)
        except UncoveredParameterError as error:
            units.widen(error)
            continue
        if reason is not None:
            raise BackendError(reason)
        if units.chosen:
            names = ", ".join(repr(unit.name) for unit in units.chosen)
            logger.info("per-example gradients: by book-keeping, with vmap over layers %s", names)
        return fast


class _Units:
    """Grows layers around parameters without a rule until they can be run as units."""

    def __init__(self, exact: LoopGradients, x: Tensor) -> None:
        self._model, self._names, self._x = exact.model, exact.parameters.names, x
        self._possible: dict[str, Unit] | None = None
        self._around: dict[int, str] = {}

    @property
    def chosen(self) -> Sequence[Unit]:
        """The units, none inside another."""
        names = sorted(set(self._around.values()))
        outer = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
        return [] if self._possible is None else [self._possible[name] for name in outer]

    def widen(self, error: UncoveredParameterError) -> None:
        """Take the next larger layer for each parameter that had no rule.

        Raises:
            BackendError: only the whole model is left.
        """
        if self._possible is None:
            names = [name for name, _ in self._model.named_modules() if name]
            self._possible = possible_units(
                self._model, names, lambda n: self._model(self._x[:n]), (_TRIED, _TRIED - 1)
            )
        for index in error.indices:
            name = self._around.get(index, self._names[index])
            while True:
                name = name.rpartition(".")[0]
                if not name:
                    raise BackendError(str(error)) from error
                if name in self._possible:
                    break
            self._around[index] = name


def _difference(
    backend: PerExampleGradients, exact: LoopGradients, x: Tensor, y: Tensor
) -> str | None:
    """Return why a backend is not right for these examples, None if it is.

    Raises:
        UncoveredParameterError: book-keeping has no rule for some parameters.
    """
    expected = exact.gradients(x, y)
    for size in (_TRIED, _TRIED - 1):
        try:
            ours = backend.gradients(x[:size], y[:size])
        except UncoveredParameterError:
            raise
        except _FAILURES as error:
            return f"it fails with {type(error).__name__}: {str(error).splitlines()[0]}"
        for i in range(size):
            name = _first_wrong(exact, ours[i], expected[i])
            if name is not None:
                return f"example {i} gets another gradient of {name} in a lot than alone"
    return None


def _first_wrong(exact: LoopGradients, ours: Tensor, expected: Tensor) -> str | None:
    """Return the first parameter whose gradients differ by more than rounding."""
    tolerance = max(1e-3, 10 * torch.finfo(expected.dtype).eps)
    slack = 1e-2 * tolerance * expected.norm() + torch.finfo(expected.dtype).tiny
    parts = exact.parameters.slices(range(len(exact.parameters.names)))
    for name, at in zip(exact.parameters.names, parts, strict=True):
        off = (ours[at] - expected[at]).norm()
        if not bool(off <= tolerance * expected[at].norm() + slack):
            return name
    return None
