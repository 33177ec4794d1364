"""Clients' examples as tensors on the device that trains them, made when a client trains."""

import torch
from torch import Tensor

from fedsim.data.shares import ClientShares

_KEPT_ON_GPU = 4 << 30  # bytes
_SMALL = 1 << 30  # bytes of examples: a second copy of them is no burden
_FEW = 4  # times the examples of a round's lots: gathering no more than that costs a tenth


class ClientTensors:
    """Features and targets of each client, made when it trains.

    On the CPU nothing is kept: a client's examples are gathered, or are a view. On a GPU, where
    they have to be moved, those are kept for later rounds that come first and fit.

    Args:
        clients: every client's examples.
        device: where to put them.
        room: bytes of tensors kept on a GPU.
    """

    def __init__(
        self, clients: ClientShares, device: torch.device, *, room: int = _KEPT_ON_GPU
    ) -> None:
        self._clients = clients
        self._device = device
        self._room = 0 if device.type == "cpu" else room
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the features and the targets of a client."""
        if client in self._kept:
            return self._kept[client]
        examples = self._clients[client]
        features = torch.from_numpy(examples.features).to(self._device)
        targets = torch.from_numpy(examples.targets).to(self._device)
        size = features.nbytes + targets.nbytes
        if size <= self._room:
            self._room -= size
            self._kept[client] = features, targets
        return features, targets


def arranged(clients: ClientShares, *, used: int, small: int = _SMALL) -> ClientShares:
    """Return the same shares, in the clients' order where gathering them each round would cost.

    All are put into the order of the clients once, and each client has a view of its own. With 50
    clients of 300 examples with 784 values, and 4 lots of 32 a round, that takes a tenth off the
    processor time of whole rounds; with 5,000 examples each, two thirds. Two copies are in memory
    for a moment, so of large data it is done only where a round uses few of a client's examples.
    What is on disk stays there.

    Args:
        clients: every client's examples.
        used: examples that a client's lots take in a round.
        small: bytes of examples that are no burden twice.
    """
    sparse = sum(clients.sizes) > _FEW * used * len(clients)
    worth = clients.in_memory and (sparse or clients.nbytes <= small)
    return clients.only(range(len(clients))) if worth else clients
