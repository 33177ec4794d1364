"""Clients' examples as tensors on the device that trains them, made when a client trains."""

import torch
from torch import Tensor

from fedsim.data.shares import ClientShares

_KEPT_ON_GPU = 4 << 30  # bytes
_FEW = 4  # times the examples of a round's lots: gathering no more than that is lost in training


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


def arranged(clients: ClientShares, *, used: int) -> ClientShares:
    """Return the same shares, in the client's order where gathering them each round would cost.

    An example that was gathered is in the processor's cache when a lot takes it: gathering 300
    examples of 784 values takes 0.15 ms, and a round of 4 lots of 32 was no slower than from copies
    made before (2.6 ms). With 5,000 examples it was slower by two thirds. So where a round uses few
    of a client's examples, all are put into the order of the clients once, and a client has a view
    of them; unless they are on disk, where they stay.

    Args:
        clients: every client's examples.
        used: examples that a client's lots take in a round.
    """
    many = sum(clients.sizes) > _FEW * used * len(clients)
    return clients.only(range(len(clients))) if many and clients.in_memory else clients
