"""The checks of a model before training are cheap: few passes, on one thread."""

import pytest
import torch
from torch import nn

from fedsim.clients.model_checks.isolation import Probe
from fedsim.experiment import load_experiment
from fedsim.federation import assembly

EXPERIMENT = {
    "name": "cost",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


class Counting(nn.Linear):
    """Counts forward passes, and the threads in which they run."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.threads: list[int] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return super().forward(input.flatten(1))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_checks_of_an_assembly_run_on_one_thread_and_once(monkeypatch, two_threads):
    model = Counting()
    backward: list[int] = []
    gradient = Probe._gradient
    monkeypatch.setattr(assembly, "initial_model", lambda *_, **__: model)
    monkeypatch.setattr(
        Probe, "_gradient", lambda self, value: backward.append(1) or gradient(self, value)
    )
    assembly.assemble(load_experiment(EXPERIMENT), ledger=None)
    assert set(model.threads) == {1}
    assert torch.get_num_threads() == 2
    # At two points: each example of the batch, and sums: again, of 8 batches with an example
    # replaced, with another seed, alone.
    assert len(backward) == 2 * (4 + 1 + 8 + 1 + 1)
