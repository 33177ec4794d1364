"""The checks of a model before training are cheap: few passes, on one thread."""

import pytest
import torch
from torch import nn

from fedsim.clients.model_checks import isolation
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
    # At two points: twice the batch, 8 batches without the replaced example, another seed, each
    # alone.
    assert len(backward) == 2 * (2 * 4 + 8 * 3 + 4 + 4)


def test_a_batch_is_seen_again_after_the_mode_or_the_parameters_changed():
    """What a probe keeps of the unchanged batch must not outlive what it was computed with."""
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, nn.Dropout(0.5), nn.Linear(3, 1))
    batch = isolation.ProbeBatch(torch.randn(4, 3), torch.randn(4, 1))
    probe = Probe(model, lambda outputs, targets: (outputs - targets).square().sum(1))
    probe.use_train_mode()
    assert probe.is_repeatable(batch)
    assert probe.is_random(batch)
    in_train = probe._see(batch).gradients
    probe.use_eval_mode()
    in_eval = probe._see(batch).gradients
    assert not torch.equal(in_train[0], in_eval[0])
    with torch.no_grad():
        first.weight.add_(1.0)
    assert probe.is_repeatable(batch)
    assert not torch.equal(in_eval[0], probe._see(batch).gradients[0])
