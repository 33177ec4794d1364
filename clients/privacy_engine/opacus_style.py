"""Constructors with the names and arguments of Opacus 1.x."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedsim.clients.dp_sgd.clipping import Clipping
from fedsim.clients.privacy_engine.loaders import PrivateLoader, loader_sizes


class OpacusStyle:
    """Makes an engine, attaches it, and replaces the data loader, in one call."""

    @classmethod
    def make_private(
        cls,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float] | Clipping,
        poisson_sampling: bool = True,
        **settings: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Return (module, optimizer, loader) ready for private training, as Opacus 1.x does.

        Module and optimizer are the same objects, attached; the loader draws lots as they are
        charged. The engine is `optimizer.privacy_engine` (and `loader.privacy_engine`):

            model, optimizer, loader = PrivacyEngine.make_private(module=model, ...)
            optimizer.privacy_engine.check_isolation(criterion, x, y)  # a few public examples
            epsilon = optimizer.privacy_engine.get_epsilon(delta=1e-5)

        Args:
            module: the model.
            optimizer: over its trainable parameters.
            data_loader: its batch_size is the expected lot, its dataset's length the public
                sample size.
            noise_multiplier: z.
            max_grad_norm: C.
            poisson_sampling: False: passes over shuffled data, without amplification.
            settings: any other argument of `PrivacyEngine`.

        Raises:
            ValueError: an argument is outside its range, or the loader cannot be replaced.
        """
        return cls._make_private(
            module,
            optimizer,
            data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            sampling="poisson" if poisson_sampling else "shuffle",
            **settings,
        )

    @classmethod
    def make_private_with_epsilon(
        cls,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | Sequence[float] | Clipping,
        poisson_sampling: bool = True,
        **settings: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
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
            settings: any other argument of `PrivacyEngine`.

        Raises:
            ValueError: as `make_private`, or no noise meets the target.
        """
        batch_size, sample_size = loader_sizes(data_loader)
        # A pass of the loader has whole lots, so its loop takes this many steps.
        steps = math.ceil(epochs * math.ceil(sample_size / batch_size))
        return cls._make_private(
            module,
            optimizer,
            data_loader,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            steps=steps,
            max_grad_norm=max_grad_norm,
            sampling="poisson" if poisson_sampling else "shuffle",
            **settings,
        )

    @classmethod
    def _make_private(
        cls,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        **settings: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        batch_size, sample_size = loader_sizes(data_loader)
        if settings.get("adjacency") == "add_remove":
            raise ValueError(
                "adjacency='add_remove' keeps the number of examples private, but the loader's "
                "length would set the sampling rate; make PrivacyEngine(model, sample_size=...) "
                "with a public number and take engine.private_loader(data_loader)"
            )
        kind: Any = cls
        engine = kind(module, batch_size=batch_size, sample_size=sample_size, **settings)
        loader = engine.private_loader(data_loader)
        engine.attach(optimizer)
        return module, optimizer, loader
