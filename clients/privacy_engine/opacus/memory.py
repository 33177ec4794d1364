"""`BatchMemoryManager` with the names of Opacus: large lots in parts that fit the memory."""

from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from fedsim.clients.privacy_engine.loaders import PrivateLoader


class BatchMemoryManager:
    """Gives out lots of a private loader in parts of at most so many examples.

    `optimizer.step()` adds a part to the lot, and updates the model at the last part of each lot:

        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=32, optimizer=optimizer
        ) as parts:
            for x, y in parts: ...

    Guarantee: as of `PrivacyEngine`: a lot is released once, with one noise, however it is split.

    Args:
        data_loader: the loader that `make_private` returned.
        max_physical_batch_size: most examples in a forward pass.
        optimizer: the optimizer that the loader's engine is attached to.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.max_physical_batch = self._before
