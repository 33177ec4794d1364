"""Chooses how per-example gradients are computed: the fastest way that is right for a model."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.fallback import OneAtATime
from fedsim.clients.gradients.per_example import (
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
)
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.model_checks.isolation import check_isolation
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state
from fedsim.core.errors import FedsimError

logger = logging.getLogger(__name__)

GradientMode = Literal["auto", "rules", "loop"]

_TRIED = 4  # and fewer: several sizes, so that no fixed dimension can pass for the examples
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
    is_isolated: bool = False,
) -> PerExampleGradients:
    """Return gradients by layer rules where they are right, else one example at a time.

    The rules are tried on the given examples and compared, example by example, with gradients
    computed alone, for lots of several sizes and for two clients; modules that no rule covers run
    through `torch.func`, together with their surroundings where needed. The choice is logged where
    it is not plain rules.

    Args:
        model: its trainable parameters become views of one flat tensor.
        loss: one value per example.
        features: a few public or synthetic examples (n ≥ 1, ...), never private ones: which way
            is chosen must not depend on private data.
        targets: their targets.
        mode: the way to take; "auto" chooses.
        is_isolated: whether these examples have passed `check_isolation` already.

    Guarantee:
        the model's values, buffers and modes and the global random generators are unchanged.

    Raises:
        BackendError: the way asked for is not right for the model.
    """
    exact = OneAtATime(model, loss)
    if mode == "loop":
        return exact
    x, y = _several(features, targets)
    with preserve_state(model):
        try:
            if not is_isolated:
                check_isolation(model, loss, x, y)
            model.eval()  # dropout would draw different masks for a lot and for one example
            return _Trial(exact, x, y).rules()
        except (UnsafeModelError, BackendError) as error:
            if mode == "rules":
                raise BackendError(f"not right for this model: {error}") from error
            logger.info("per-example gradients: one example at a time, because %s", error)
    return exact


def training_gradients(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor, *, private: bool
) -> PerExampleGradients | None:
    """Return the gradients that clients of an experiment train with; None: torch's own.

    Without privacy, rules are taken where they cover the whole model and several clients can train
    in one tile; a model whose buffers may change trains by torch.

    With privacy, a model in which examples are coupled is refused.

    Args:
        model: its trainable parameters become views of one flat tensor.
        loss: one value per example.
        features: a few public examples (n ≥ 1, ...).
        targets: their targets.
        private: whether gradients are clipped.

    Raises:
        UnsafeModelError: gradients are clipped, and examples are coupled; the message names them.
    """
    if private:
        x, y = _several(features, targets)
        check_isolation(model, loss, x, y)
        return gradients_for(model, loss, x, y, is_isolated=True)
    if next(model.buffers(), None) is not None:
        return None
    found = gradients_for(model, loss, features, targets)
    whole = isinstance(found, RuleGradients) and found.stacks and not found.units
    return found if whole else None


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


class _Trial:
    """Tries the rules on examples, with ever larger units.

    Args:
        exact: the reference.
        x: examples (n, ...).
        y: their targets.
    """

    def __init__(self, exact: OneAtATime, x: Tensor, y: Tensor) -> None:
        self._exact, self._x, self._y = exact, x, y
        self._expected = exact.gradients(x, y)

    def rules(self) -> RuleGradients:
        """Return gradients by rules that agree with gradients computed alone.

        Raises:
            BackendError: there are none.
        """
        exact = self._exact
        units: frozenset[str] = frozenset()
        while True:
            fast = RuleGradients(
                exact.model, exact.loss, parameters=exact.parameters, units=sorted(units)
            )
            wrong, reason = self._first_difference(fast)
            if reason is None:
                break
            if "" in units:
                raise BackendError(reason)
            units = self._widened(units, wrong)
        if units:
            names = ", ".join(repr(name) if name else "the whole model" for name in sorted(units))
            logger.info("per-example gradients: by rules, with torch.func for %s", names)
        fast.stacks = self._agrees_for_two_clients(fast)
        return fast

    def _first_difference(self, fast: RuleGradients) -> tuple[Sequence[int], str | None]:
        """Return the parameters that are wrong, and why; no reason where nothing is wrong."""
        if fast.ruled.uncovered:
            return fast.ruled.uncovered, "parameters have no rule"
        for size in (_TRIED, _TRIED - 1, 1):
            try:
                found = fast.gradients(self._x[:size], self._y[:size])
            except UncoveredParameterError as error:
                return error.indices, str(error)
            except _FAILURES as error:
                return (), f"it fails with {type(error).__name__}: {str(error).splitlines()[0]}"
            wrong = self._wrong(found, self._expected[:size])
            if wrong:
                name = self._exact.parameters.names[wrong[0]]
                return wrong, f"an example gets another gradient of {name} in a lot than alone"
        return (), None

    def _widened(self, units: frozenset[str], wrong: Sequence[int]) -> frozenset[str]:
        """Return units around the wrong parameters, or around all, one size larger."""
        names = self._exact.parameters.names
        found = set(units)
        for index in wrong or range(len(names)):
            inside = [u for u in units if not u or names[index].startswith(f"{u}.")]
            found.add((inside[0] if inside else names[index]).rpartition(".")[0])
        found = {self._module_of(name) for name in found}
        return frozenset(
            name
            for name in found
            if not any(
                name != other and (not other or name.startswith(f"{other}.")) for other in found
            )
        )

    def _module_of(self, name: str) -> str:
        """Return the name of the module that holds a parametrised weight, for one of its parts."""
        return name.partition(".parametrizations.")[0].removesuffix("parametrizations").rstrip(".")

    def _wrong(self, found: Tensor, expected: Tensor) -> list[int]:
        """Return the parameters whose gradients differ by more than rounding."""
        parameters = self._exact.parameters
        tolerance = max(1e-3, 10 * torch.finfo(expected.dtype).eps)
        slack = 1e-2 * tolerance * expected.norm(dim=1) + torch.finfo(expected.dtype).tiny
        wrong = []
        for index, at in enumerate(parameters.slices(range(len(parameters.names)))):
            off = (found[:, at] - expected[:, at]).norm(dim=1)
            if not bool((off <= tolerance * expected[:, at].norm(dim=1) + slack).all()):
                wrong.append(index)
        return wrong

    def _agrees_for_two_clients(self, fast: RuleGradients) -> bool:
        """Whether two clients with different parameters get their own gradients in one tile."""
        data = self._exact.parameters.data
        before = data.clone()
        generator = torch.Generator().manual_seed(1)
        moved = torch.randn(data.shape, generator=generator).to(data)
        other = 1.3 * before + 0.1 * (before.std(correction=0) + 0.01) * moved
        half = _TRIED // 2
        try:
            values = torch.stack([before, other])
            found = fast.gradients(self._x, self._y, values)
            data.copy_(other)
            expected = self._exact.gradients(self._x[half:], self._y[half:])
        except _FAILURES:
            return False
        finally:
            data.copy_(before)
        both = torch.cat([self._expected[:half], expected])
        return not self._wrong(found, both) and not self._is_random()

    def _is_random(self) -> bool:
        """Whether the model draws random numbers in training, which several clients would share."""
        model = self._exact.model
        with preserve_state(model), torch.no_grad():
            model.train()
            state = torch.get_rng_state()
            model(self._x)
            return not torch.equal(state, torch.get_rng_state())
