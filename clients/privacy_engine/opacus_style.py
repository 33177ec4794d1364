"""Methods and classes named as in Opacus 1.x, such as `make_private` and `ModuleValidator`."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedsim.clients.clipping.clipping import Clipping
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.privacy_engine.loaders import PrivateLoader, loader_sizes
from fedsim.clients.privacy_engine.opacus_names import without_opacus_arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")


class on_engine(Generic[_P, _R]):
    """Decorator for a method that creates a new engine if it is called on the class.

    `PrivacyEngine.make_private(...)` means `PrivacyEngine().make_private(...)`.
    """

    def __init__(self, method: Callable[Concatenate[Any, _P], _R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, engine: Any, owner: Callable[[], Any]) -> Callable[_P, _R]:
        return MethodType(self._method, owner() if engine is None else engine)


class EngineAccount:
    """Privacy spending of an engine, with the methods of Opacus's accountants.

    Args:
        engine: the engine whose ledger is accounted for.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Return ε of all charges at δ, as `PrivacyEngine.get_epsilon` does."""
        return self._engine.get_epsilon(delta)

    def get_privacy_spent(self, *, delta: float, **_: Any) -> tuple[float, float | None]:
        """Return (ε, best Rényi order α) at δ, as `PrivacyEngine.get_privacy_spent` does."""
        return self._engine.get_privacy_spent(delta)

    def __len__(self) -> int:
        """Return the number of steps, including those with an empty batch."""
        return self._engine.steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of Opacus's accountants is not supported; engine.ledger has all charges, "
            "engine.state_dict() stores them, and fedsim.accountant has separate accountants"
        )


class OpacusStyle:
    """Base class with Opacus's methods that set up the engine and replace the loader."""

    _settings: dict[str, Any]

    @property
    def accountant(self) -> EngineAccount:
        """Privacy spending of the engine, with the methods of Opacus's accountants."""
        return EngineAccount(self)

    @on_engine
    def make_private(
        self: Any,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float] | Clipping,
        poisson_sampling: bool = True,
        criterion: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> tuple[Any, ...]:
        """Return (module, optimizer, loader) ready for private training, as Opacus 1.x does.

        Module and optimizer are the given objects, attached to the engine. The loader is new, and
        samples batches in the way that is charged:

            engine = PrivacyEngine()
            model, optimizer, loader = engine.make_private(module=model, ...)
            epsilon = engine.get_epsilon(delta=1e-5)

        The engine is also `optimizer.privacy_engine` and `loader.privacy_engine`.

        Args:
            module: the model.
            optimizer: the optimizer of the model's trainable parameters.
            data_loader: a loader; its batch_size becomes the expected batch size, and the length of
                its dataset the public sample size.
            noise_multiplier: standard deviation of the noise on the sum, divided by the clip norm.
            max_grad_norm: the clip norm or clip norms, as for `PrivacyEngine`.
            poisson_sampling: whether batches are Poisson samples; otherwise the data are shuffled
                for each pass, without amplification.
            criterion: the loss, for `grad_sample_mode="ghost"` only; it is returned unchanged as
                the third of four results, as in Opacus.
            settings: any other argument of `PrivacyEngine` or of Opacus.

        Raises:
            ValueError: an argument is outside its range, the loader cannot be replaced, or the
                engine already has a model.
        """
        return _make_private(
            self,
            module,
            optimizer,
            data_loader,
            criterion,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            sampling="poisson" if poisson_sampling else "shuffle",
            **settings,
        )

    @on_engine
    def make_private_with_epsilon(
        self: Any,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Sequence[float] | Clipping,
        poisson_sampling: bool = True,
        criterion: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> tuple[Any, ...]:
        """Return (module, optimizer, loader) as `make_private` does, with noise for a target ε.

        Args:
            module: the model.
            optimizer: the optimizer of the model's trainable parameters.
            data_loader: a loader; its batch_size becomes the expected batch size, and the length of
                its dataset the public sample size.
            target_epsilon: the ε at `target_delta` after `epochs` passes over the data.
            target_delta: δ of the calibration.
            epochs: number of passes of the loader.
            max_grad_norm: the clip norm or clip norms, as for `PrivacyEngine`.
            poisson_sampling: whether batches are Poisson samples; otherwise the data are shuffled.
            criterion: the loss, for `grad_sample_mode="ghost"` only; it is then the third result.
            settings: any other argument of `PrivacyEngine` or of Opacus.

        Raises:
            ValueError: `make_private` would raise an error, or no noise meets the target.
        """
        batch_size, sample_size = loader_sizes(data_loader)
        # A pass of the loader has whole batches, so its loop takes this many steps.
        steps = math.ceil(epochs * math.ceil(sample_size / batch_size))
        return _make_private(
            self,
            module,
            optimizer,
            data_loader,
            criterion,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            steps=steps,
            max_grad_norm=max_grad_norm,
            sampling="poisson" if poisson_sampling else "shuffle",
            **settings,
        )


def _make_private(
    engine: Any,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    criterion: Callable[..., Any] | None,
    **settings: Any,
) -> tuple[Any, ...]:
    if "terms" in vars(engine):
        raise ValueError(
            "this PrivacyEngine has a model already, and its account is that model's; make a new "
            "PrivacyEngine() for another model or another training"
        )
    is_ghost = settings.get("grad_sample_mode") == "ghost"
    if is_ghost and criterion is None:
        raise ValueError("grad_sample_mode='ghost' of Opacus returns a criterion: pass criterion=")
    chosen = dict(engine._settings) | without_opacus_arguments(settings)
    unknown = sorted(set(chosen) - set(engine._settings))
    if unknown:
        raise TypeError(f"make_private has no argument {unknown[0]!r}")
    if chosen["adjacency"] == "add_remove":
        raise ValueError(
            "adjacency='add_remove' keeps the number of examples private, but the loader's "
            "length would set the sampling rate; make PrivacyEngine(model, sample_size=...) "
            "with a public number and take engine.private_loader(data_loader)"
        )
    batch_size, sample_size = loader_sizes(data_loader)
    engine._set_up(module, batch_size, sample_size, chosen)
    loader: PrivateLoader = engine.private_loader(data_loader)
    engine.attach(optimizer)
    return (module, optimizer, criterion, loader) if is_ghost else (module, optimizer, loader)


class BatchMemoryManager:
    """Context manager that splits a private loader's batches into smaller physical batches.

    `optimizer.step()` adds each physical batch to the logical batch. At the last one of a logical
    batch, it updates the model:

        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=32, optimizer=optimizer
        ) as parts:
            for x, y in parts: ...

    Guarantee: a logical batch is released once, with noise added once, no matter how it is split.

    Args:
        data_loader: the loader that `make_private` returned.
        max_physical_batch_size: largest physical batch, in examples.
        optimizer: the optimizer to which the loader's engine is attached.

    Raises:
        ValueError: the loader is not private, or another engine is attached to the optimizer.
    """

    def __init__(
        self, *, data_loader: PrivateLoader, max_physical_batch_size: int, optimizer: Optimizer
    ) -> None:
        engine: Any = getattr(data_loader, "privacy_engine", None)
        if engine is None or optimizer.__dict__.get("privacy_engine") is not engine:
            raise ValueError(
                "BatchMemoryManager needs the loader and the optimizer that one call of "
                "PrivacyEngine().make_private(...) returned"
            )
        self._loader, self._engine, self._most = data_loader, engine, max_physical_batch_size
        self._before: int | None = None

    def __enter__(self) -> PrivateLoader:
        self._before = self._engine.max_physical_batch
        self._engine.max_physical_batch = self._most
        return self._loader

    def __exit__(self, *error: object) -> None:
        self._engine.max_physical_batch = self._before


_GROUPS = 32  # most groups of GroupNorm: the best number in Wu and He 2018


class ModuleValidator:
    """Validator that finds and replaces layers that example-level privacy does not allow.

    It checks layer types only. The first forward pass of an attached model checks whether the model
    mixes examples in another way.
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsafeModelError]:
        """Return an error for each layer that example-level privacy does not allow, as a list.

        Args:
            module: the model.
            strict: whether to raise the first error instead of returning a list.

        Raises:
            UnsafeModelError: with `strict`, a layer mixes examples or keeps statistics of them.
        """
        errors = [
            UnsafeModelError(f"layer {name!r} ({type(layer).__name__}) {reason}")
            for name, layer in module.named_modules()
            if (reason := _reason(layer)) is not None
        ]
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether all layers can be trained with example-level privacy.

        Example:
            >>> from torch import nn
            >>> from fedsim.clients import ModuleValidator
            >>> ModuleValidator.is_valid(nn.BatchNorm1d(4))
            False
        """
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module) -> nn.Module:
        """Return a copy of the model with other layers in place of those that `validate` reports.

        BatchNorm becomes GroupNorm with new weights, and InstanceNorm loses its running statistics.
        Create the optimizer with the parameters of the copy.

        Example:
            >>> from torch import nn
            >>> from fedsim.clients import ModuleValidator
            >>> ModuleValidator.fix(nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32)))[1]
            GroupNorm(32, 32, eps=1e-05, affine=True, bias=True)
        """
        fixed = deepcopy(module)
        for name, layer in list(fixed.named_modules()):
            if _reason(layer) is None:
                continue
            if not name:
                return _replaced(layer)
            parent, _, child = name.rpartition(".")
            setattr(fixed.get_submodule(parent), child, _replaced(layer))
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """Return the copy of a model that `fix` makes, after a strict check by `validate`."""
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed


def _reason(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm):
        return (
            "mixes the examples of a batch; replace it by "
            f"nn.GroupNorm({_groups(layer)}, {layer.num_features}), as ModuleValidator.fix does"
        )
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "keeps running statistics of private examples; set track_running_stats=False"
    return None


def _groups(layer: _BatchNorm) -> int:
    if isinstance(layer, nn.BatchNorm1d):
        return 1  # after a Linear layer, groups of one value each would be zero for every input
    return math.gcd(_GROUPS, layer.num_features)


def _replaced(layer: nn.Module) -> nn.Module:
    if isinstance(layer, _BatchNorm):
        norm = nn.GroupNorm(_groups(layer), layer.num_features, layer.eps, layer.affine)
        like = layer.running_mean if layer.weight is None else layer.weight
        return norm if like is None else norm.to(like)
    if isinstance(layer, _InstanceNorm):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return layer
