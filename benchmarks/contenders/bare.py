"""The limit: a loop of plain PyTorch over the clients, without privacy and without a framework."""

import torch
from torch import nn

from contenders.base import Contender, Work, check_device


class BareLoop(Contender):
    """One model filled anew for each client, SGD on shuffled batches, a running sum.

    Args:
        device: cpu or cuda; examples, model and sum are there.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self.name = "bare loop, no privacy" + ("" if device == "cpu" else f", {device}")

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        check_device(self._device.type)
        x, y = work.data()
        self._work = work
        self._data = (
            torch.from_numpy(x).to(self._device),
            torch.from_numpy(y).to(self._device),
        )
        self._model, self._loss = work.build().to(self._device), nn.CrossEntropyLoss()
        self._parameters = list(self._model.parameters())
        self._global = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = torch.optim.SGD(self._parameters, lr=work.lr)

    def round(self) -> None:
        """Do one round: every client trains, the server averages."""
        sums = [torch.zeros_like(value) for value in self._global]
        for client in range(self._work.clients):
            self._train(client)
            for total, parameter in zip(sums, self._parameters, strict=True):
                total.add_(parameter.detach())
        for value, total in zip(self._global, sums, strict=True):
            value.copy_(total / self._work.clients)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _train(self, client: int) -> None:
        n, batch = self._work.examples, self._work.batch
        x, y = (part[client * n : (client + 1) * n] for part in self._data)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._global, strict=True):
                parameter.copy_(value)
        order = torch.randperm(n, device=self._device)
        for step in range(self._work.steps):
            start = step * batch % n
            index = order[start : start + batch]
            self._optimizer.zero_grad()
            self._loss(self._model(x[index]), y[index]).backward()
            self._optimizer.step()
