"""`make_private` and `accountant` with the names and arguments of Opacus 1.x."""

import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedsim.clients.clipping.clipping import Clipping
from fedsim.clients.privacy_engine.loaders import PrivateLoader, loader_sizes
from fedsim.clients.privacy_engine.opacus.names import without_opacus_arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")


class on_engine(Generic[_P, _R]):
    """A method that makes an engine where it is called on the class.

    `PrivacyEngine.make_private(...)` is `PrivacyEngine().make_private(...)`.
    """

    def __init__(self, method: Callable[Concatenate[Any, _P], _R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, engine: Any, owner: Callable[[], Any]) -> Callable[_P, _R]:
        return MethodType(self._method, owner() if engine is None else engine)


class EngineAccount:
    """The account of an engine, with the names of Opacus's accountants.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Return ε of all charges at δ (see `PrivacyEngine.get_epsilon`)."""
        return self._engine.get_epsilon(delta)

    def get_privacy_spent(self, *, delta: float, **_: Any) -> tuple[float, float | None]:
        """Return (ε, best α) at δ (see `PrivacyEngine.get_privacy_spent`)."""
        return self._engine.get_privacy_spent(delta)

    def __len__(self) -> int:
        """Number of steps, empty lots included."""
        return self._engine.steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of Opacus's accountants has another place here: engine.ledger has all "
            "charges, engine.state_dict() stores them, and fedsim.accountant has accountants of "
            "their own"
        )


class OpacusStyle:
    """Sets an engine up, attaches it, and replaces the data loader, in one call."""

    _settings: dict[str, Any]

    @property
    def accountant(self) -> EngineAccount:
        """The engine's account, with the names of Opacus."""
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

        Module and optimizer are the same objects, attached; the loader draws lots as they are
        charged:

            engine = PrivacyEngine()
            model, optimizer, loader = engine.make_private(module=model, ...)
            epsilon = engine.get_epsilon(delta=1e-5)

        The engine is also `optimizer.privacy_engine` and `loader.privacy_engine`.

        Args:
            module: the model.
            optimizer: over its trainable parameters.
            data_loader: its batch_size is the expected lot, its dataset's length the public
                sample size.
            noise_multiplier: z.
            max_grad_norm: C.
            poisson_sampling: False: passes over shuffled data, without amplification.
            criterion: the loss, only for `grad_sample_mode="ghost"`, where it is the third of four
                results, as in Opacus; it is returned as it is.
            settings: any other argument of `PrivacyEngine` or of Opacus.

        Raises:
            ValueError: an argument is outside its range, the loader cannot be replaced, or the
                engine has a model already.
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
        """Return as `make_private`, with noise calibrated to a target ε.

        Args:
            module: as in `make_private`.
            optimizer: as in `make_private`.
            data_loader: as in `make_private`.
            target_epsilon: ε after `epochs` passes.
            target_delta: δ of that ε.
            epochs: number of passes of the loader.
            max_grad_norm: C.
            poisson_sampling: as in `make_private`.
            criterion: as in `make_private`.
            settings: any other argument of `PrivacyEngine` or of Opacus.

        Raises:
            ValueError: as `make_private`, or no noise meets the target.
        """
        batch_size, sample_size = loader_sizes(data_loader)
        # A pass of the loader has whole lots, so its loop takes this many steps.
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
