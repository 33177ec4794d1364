"""Checks of models and losses without a federation, for use in tests of your own models.

    from fedsim.testing import check_model

    def test_my_model_keeps_the_contract():
        check_model(build, features, targets, loss=my_loss)

`check_model` makes all checks of a run that a model or a loss can fail. It reports all failures at
once, each with its fix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.model_checks.isolation import check_isolation
from fedsim.clients.model_checks.safety import check_private_model
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.plain import train_by_torch
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.plugin_errors import contained_exits, error_text, type_name
from fedsim.data.examples import Examples, to_dataset
from fedsim.models.build import preflight
from fedsim.models.losses import PerExampleLoss, resolve_loss
from fedsim.models.tasks import eval_mode, task_for

CheckStatus = Literal["ok", "failed", "skipped"]

_LOCAL = LocalSettings(steps=2, batch_size=8, optimizer=SgdSettings(name="sgd", lr=0.1))
_GRADIENT_METHODS = {
    "RuleGradients": "by layer rules, the fast method",
    "OneAtATime": "one example at a time, slow: torch.func cannot run the model",
}


@dataclass(frozen=True)
class Check:
    """The result of one check; `detail` explains the outcome, or names the fix after a failure."""

    name: str
    outcome: CheckStatus
    detail: str


@dataclass(frozen=True)
class Contract:
    """The results of all checks of a model and a loss; `str()` returns them as a table."""

    checks: tuple[Check, ...]

    @property
    def kept(self) -> bool:
        """Whether no check has failed."""
        return not any(check.outcome == "failed" for check in self.checks)

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        return "\n".join(f"{c.outcome:<8}{c.name:<{width}}  {c.detail}" for c in self.checks)


class ContractError(AssertionError):
    """Error of a model or loss that a run would refuse; it lists all checks with their fixes."""

    def __init__(self, contract: Contract) -> None:
        failed = sum(check.outcome == "failed" for check in contract.checks)
        super().__init__(f"{failed} of {len(contract.checks)} checks failed\n{contract}")
        self.contract = contract


def check_model(
    build: Callable[..., nn.Module],
    features: Any,
    targets: Any,
    *,
    loss: str | PerExampleLoss = "cross_entropy",
    args: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    private: bool = True,
    seed: int = 0,
) -> Contract:
    """Check that a model and a loss meet all requirements of a run.

    A few made-up examples are enough; they should differ and contain every class. The checks take
    seconds; nothing is downloaded or written.

    Args:
        build: the function that `model.name` names: called with `args`, it returns an `nn.Module`.
        features: (n, ...) array, tensor or list; at least 4 examples make the checks effective.
        targets: (n,) or (n, ...) targets, as a dataset function returns them.
        loss: a built-in name, or the function that `model.loss` names.
        args: the arguments of `build`, as in `model.args` of the experiment.
        num_classes: number of classes in all data; None means those in `targets`.
        private: whether the experiment has `privacy:`, so that more checks apply to the model.
        seed: seed of the initial weights, batches and noise.

    Returns:
        The results of all checks, none of which failed.

    Raises:
        ContractError: a check failed; the message names each failure with its fix.
        ValueError: features and targets are not valid data (`DataError`), or the loss is unknown.

    Example:
        >>> from torch import nn
        >>> contract = check_model(lambda: nn.Linear(3, 2), torch.randn(6, 3), [0, 1] * 3)
        >>> contract.kept
        True
    """
    examples = to_dataset(features, targets).train
    name = loss if isinstance(loss, str) else "model.loss"
    function = resolve_loss(loss, base=Path()) if isinstance(loss, str) else loss
    trial = _Trial(build, dict(args or {}), examples, function, seed)
    checks = _Checks()
    checks.run("builds a module", trial.builds)
    checks.run("same seed, same weights", trial.builds_the_same_again)
    checks.run("fits data and loss", lambda: trial.fits(name, num_classes))
    checks.run("same input, same output", trial.repeats_itself)
    if private:
        checks.run("keeps no batch statistics", trial.keeps_no_statistics)
        checks.run("keeps examples independent", trial.keeps_examples_apart)
        checks.run("has per-example gradients", trial.has_gradients)
    checks.run("trains reproducibly", lambda: trial.trains(private=private))
    contract = Contract(tuple(checks.checks))
    if not contract.kept:
        raise ContractError(contract)
    return contract


class _Checks:
    """Runs checks one by one, and skips later ones if no module fits the data."""

    _NEEDED = ("builds a module", "fits data and loss")

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def run(self, name: str, action: Callable[[], str]) -> None:
        """Run one check and record its outcome; a plug-in may raise any exception."""
        missing = [c.name for c in self.checks if c.outcome == "failed" and c.name in self._NEEDED]
        if missing:
            self.checks.append(Check(name, "skipped", f"needs: {missing[0]}"))
            return
        try:
            with contained_exits():
                self.checks.append(Check(name, "ok", action()))
        except Exception as error:  # noqa: BLE001 - every failure of a plug-in is a result
            text = error_text(error) or "no message"
            kind = "" if isinstance(error, ValueError) else f"{type_name(error)}: "
            self.checks.append(Check(name, "failed", kind + text))


class _Trial:
    """The model under test, rebuilt for every check that may change it."""

    def __init__(
        self,
        build: Callable[..., nn.Module],
        args: dict[str, Any],
        examples: Examples,
        loss: PerExampleLoss,
        seed: int,
    ) -> None:
        self._build, self._args, self._loss, self._seed = build, args, loss, seed
        self._examples = examples
        self._features = torch.from_numpy(examples.features)
        self._targets = torch.from_numpy(examples.targets)

    def builds(self) -> str:
        model = self._new()
        if not isinstance(model, nn.Module):
            got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            raise ValueError(f"must return a torch.nn.Module, got {got}")
        if any(is_lazy(parameter) for parameter in model.parameters()):
            raise ValueError("lazy layers have no weights yet; give every layer its input size")
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if trainable == 0:
            raise ValueError("nothing to train; at least one parameter must have requires_grad")
        return f"{trainable:,} trainable values"

    def builds_the_same_again(self) -> str:
        changed = _difference(self._new().state_dict(), self._new().state_dict())
        if changed is not None:
            raise ValueError(
                f"{changed!r} differs between two builds with one seed; draw initial weights from "
                "torch's own generator only"
            )
        return "two builds agree"

    def fits(self, name: str, num_classes: int | None) -> str:
        task = task_for(name, self._examples.targets, num_classes=num_classes)
        preflight(self._new(), self._loss, task, self._examples, name="the loss")
        return f"outputs and losses fit examples of shape {tuple(self._features.shape[1:])}"

    def repeats_itself(self) -> str:
        model = self._new()
        with eval_mode(model), torch.no_grad():
            first, second = model(self._features), model(self._features)
        if not torch.equal(first, second):
            raise ValueError(
                "in eval mode two passes over the same examples differ; let random layers be "
                "quiet when self.training is False"
            )
        return "two passes in eval mode agree"

    def keeps_no_statistics(self) -> str:
        check_private_model(self._new(), self._features)
        return "no batch statistics, no changing buffers"

    def keeps_examples_apart(self) -> str:
        check_isolation(self._new(), self._loss, self._features, self._targets)
        return "no example moves the gradient of another"

    def has_gradients(self) -> str:
        gradients = gradients_for(self._new(), self._loss, self._features, self._targets)
        method = type(gradients).__name__
        if isinstance(gradients, RuleGradients) and gradients.units:
            return "by torch.func; layers that rules know would be faster"
        return _GRADIENT_METHODS.get(method, method)

    def trains(self, *, private: bool) -> str:
        before = self._new().state_dict()
        first, second = (self._trained(private=private) for _ in range(2))
        broken = [name for name, value in first.items() if not _finite(value)]
        if broken:
            raise ValueError(f"{broken[0]!r} is not finite after two steps; scale the features")
        if (changed := _difference(first, second)) is not None:
            raise ValueError(
                f"{changed!r} differs between two trainings with one seed; random layers must draw "
                "from torch's own generator only"
            )
        if _difference(before, first) is None:
            raise ValueError("two steps change no parameter; is the graph cut (detach, no_grad)?")
        return "two steps of " + ("DP-SGD" if private else "SGD") + ", twice"

    def _new(self) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seed)
            return self._build(**self._args)

    def _trained(self, *, private: bool) -> dict[str, Tensor]:
        model, key = self._new(), StreamKey(self._seed, 0, 1)
        data = (self._features, self._targets)
        if not private:
            train_by_torch(model, self._loss, *data, _LOCAL, key)
            return model.state_dict()
        gradients = gradients_for(model, self._loss, *data)
        batch = max(1.0, 0.5 * len(self._features))
        step = DpSgdMechanism(PoissonSampling(0.5), FlatClipping(1.0), 1.0, batch)
        member = BlockMember(*data, key, range(_LOCAL.given_steps), step)
        shared_model = SharedModel(model, parameters=gradients.parameters)
        block_of(shared_model, self._loss, gradients, _LOCAL, [member]).train()
        return model.state_dict()


def _difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose values differ."""
    if list(first) != list(second):
        return "the list of names in state_dict()"
    return next((name for name in first if not _same(first[name], second[name])), None)


def _same(first: Tensor, second: Tensor) -> bool:
    return bool(np.array_equal(first.detach().numpy(), second.detach().numpy(), equal_nan=True))


def _finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())
