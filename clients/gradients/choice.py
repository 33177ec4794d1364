"""Choice of the fastest method that computes a model's per-example gradients correctly."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.clients.gradients.per_example import (
    OneAtATime,
    PerExampleGradients,
    PerExampleLoss,
    UncoveredParameterError,
)
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.model_checks.isolation import check_isolation
from fedsim.clients.model_checks.safety import UnsafeModelError, preserve_state
from fedsim.core.errors import FedsimError

logger = logging.getLogger(__name__)

_TRIED = 4  # and fewer: several batch sizes, so that no fixed dimension passes for the batch
# Errors of models that are run in a way that they were not written for.
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
    """Error: the requested gradient method computes wrong per-example gradients for a model."""


def gradients_for(
    model: nn.Module,
    loss: PerExampleLoss,
    features: Tensor,
    targets: Tensor,
    *,
    rules_only: bool = False,
    is_isolated: bool = False,
) -> PerExampleGradients:
    """Return a gradient method for a model: fast layer rules, or a loop over single examples.

    A layer rule is code for one type of layer. It computes the gradients of all examples of a batch
    together. Rules are used if they are correct for the model. To find out, they are tried on the
    given examples and compared with the loop, for several batch sizes and for two clients. Modules
    without a rule, and if needed the modules that contain them, run through `torch.func`. The
    choice is logged unless all modules run by rules.

    Args:
        model: the model; its trainable parameters become views of one flat tensor.
        loss: function of (outputs, targets) that returns one value per example.
        features: a few public or synthetic examples (n, ...), at least one; never private examples,
            as the choice must not depend on private data.
        targets: targets of these examples (n, ...).
        rules_only: whether wrong rules are an error; otherwise the result is then the loop.
        is_isolated: whether `check_isolation` has already passed with these examples.

    Guarantee:
        the model's values, buffers and modes and the global random generators are unchanged.

    Raises:
        BackendError: layer rules are not correct for the model, and `rules_only` is true.
    """
    exact = OneAtATime(model, loss)
    x, y = _several(features, targets)
    with preserve_state(model):
        try:
            if not is_isolated:
                check_isolation(model, loss, x, y)
            model.eval()  # dropout would draw different masks for a batch and for one example
            return _Trial(exact, x, y).rules()
        except (UnsafeModelError, BackendError) as error:
            if rules_only:
                raise BackendError(f"not right for this model: {error}") from error
            logger.info("per-example gradients: one example at a time, because %s", error)
    return exact


def training_gradients(
    model: nn.Module, loss: PerExampleLoss, features: Tensor, targets: Tensor, *, private: bool
) -> PerExampleGradients | None:
    """Return the gradient method that clients train with, or None for training by torch's autograd.

    With privacy, the method is that of `gradients_for`, after a check that no example changes the
    gradient of another example.

    Without privacy, the method is layer rules if they cover every module, are correct for padded
    batches with examples of several clients, and the model has no buffers. Otherwise the result is
    None.

    Args:
        model: the model; its trainable parameters become views of one flat tensor.
        loss: function of (outputs, targets) that returns one value per example.
        features: a few public examples (n, ...), at least one.
        targets: targets of these examples (n, ...).
        private: whether gradients are clipped.

    Raises:
        UnsafeModelError: gradients are clipped, and an example changes the gradient of another one;
            the message names the layer.
    """
    if private:
        x, y = _several(features, targets)
        check_isolation(model, loss, x, y)
        return gradients_for(model, loss, x, y, is_isolated=True)
    if next(model.buffers(), None) is not None:
        return None
    gradients = gradients_for(model, loss, features, targets)
    whole = isinstance(gradients, RuleGradients) and gradients.stacks and not gradients.units
    return gradients if whole else None


def _several(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return `_TRIED` examples; where there are fewer, repeated ones get a little noise."""
    if len(features) == 0:
        raise ValueError(
            "the choice of a gradient method needs at least one public example, got none"
        )
    index = torch.arange(_TRIED, device=features.device) % len(features)
    x, y = features[index].clone(), targets[index.to(targets.device)]
    if x.is_floating_point() and len(features) < _TRIED:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x.shape, generator=generator).to(x)
        x[len(features) :] += 0.1 * (x.std() + 0.1) * noise[len(features) :]
    return x, y


class _Trial:
    """Tries layer rules on examples, with `torch.func` for more modules where rules fail.

    Args:
        exact: the reference, which computes the gradient of each example alone.
        x: features of the examples (n, ...).
        y: targets of the examples (n, ...).
    """

    def __init__(self, exact: OneAtATime, x: Tensor, y: Tensor) -> None:
        self._exact, self._x, self._y = exact, x, y
        self._expected = exact.gradients(x, y)

    def rules(self) -> RuleGradients:
        """Return gradients by rules that agree with the gradients of single examples.

        Raises:
            BackendError: rules disagree with the reference even with all modules in `torch.func`.
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
        """Return the parameters with wrong gradients and the reason; None if all are right."""
        if fast.ruled.uncovered:
            return fast.ruled.uncovered, "parameters have no rule"
        for size in (_TRIED, _TRIED - 1, 1):
            try:
                computed = fast.gradients(self._x[:size], self._y[:size])
            except UncoveredParameterError as error:
                return error.indices, str(error)
            except _FAILURES as error:
                return (), f"it fails with {type(error).__name__}: {str(error).splitlines()[0]}"
            wrong = self._wrong(computed, self._expected[:size])
            if wrong:
                name = self._exact.parameters.names[wrong[0]]
                return wrong, f"an example gets another gradient of {name} in a batch than alone"
        return (), None

    def _widened(self, units: frozenset[str], wrong: Sequence[int]) -> frozenset[str]:
        """Return units that are one module level larger around the wrong parameters, or all."""
        names = self._exact.parameters.names
        wider = set(units)
        for index in wrong or range(len(names)):
            inside = [u for u in units if not u or names[index].startswith(f"{u}.")]
            wider.add((inside[0] if inside else names[index]).rpartition(".")[0])
        wider = {self._module_of(name) for name in wider}
        return frozenset(
            name
            for name in wider
            if not any(
                name != other and (not other or name.startswith(f"{other}.")) for other in wider
            )
        )

    def _module_of(self, name: str) -> str:
        """Return the module of a name, which may be a module or a part of a parametrised weight."""
        return name.partition(".parametrizations.")[0].removesuffix("parametrizations").rstrip(".")

    def _wrong(self, computed: Tensor, expected: Tensor) -> list[int]:
        """Return the indices of parameters whose gradients differ by more than rounding."""
        parameters = self._exact.parameters
        tolerance = max(1e-3, 10 * torch.finfo(expected.dtype).eps)
        slack = 1e-2 * tolerance * expected.norm(dim=1) + torch.finfo(expected.dtype).tiny
        wrong = []
        for index, at in enumerate(parameters.slices(range(len(parameters.names)))):
            off = (computed[:, at] - expected[:, at]).norm(dim=1)
            if not bool((off <= tolerance * expected[:, at].norm(dim=1) + slack).all()):
                wrong.append(index)
        return wrong

    def _agrees_for_two_clients(self, fast: RuleGradients) -> bool:
        """Return whether two clients with different parameters get right gradients in one batch."""
        data = self._exact.parameters.data
        before = data.clone()
        generator = torch.Generator().manual_seed(1)
        moved = torch.randn(data.shape, generator=generator).to(data)
        other = 1.3 * before + 0.1 * (before.std(correction=0) + 0.01) * moved
        half = _TRIED // 2
        try:
            values = torch.stack([before, other])
            computed = fast.gradients(self._x, self._y, values)
            data.copy_(other)
            expected = self._exact.gradients(self._x[half:], self._y[half:])
        except _FAILURES:
            return False
        finally:
            data.copy_(before)
        both = torch.cat([self._expected[:half], expected])
        return not self._wrong(computed, both) and not self._is_random()

    def _is_random(self) -> bool:
        """Return whether the model draws random numbers in training, which clients would share."""
        model = self._exact.model
        with preserve_state(model), torch.no_grad():
            model.train()
            state = torch.get_rng_state()
            model(self._x)
            return not torch.equal(state, torch.get_rng_state())
