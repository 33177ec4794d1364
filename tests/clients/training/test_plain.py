"""Training without privacy by torch: the batches, and the mean over each of them."""

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.local_settings import LocalSettings, SgdSettings
from fedsim.clients.training.member import StreamKey
from fedsim.clients.training.plain import shuffled_batches, train_by_torch
from fedsim.core.streams import Purpose

KEY = StreamKey(seed=1, client=2, round_number=3)
SGD = SgdSettings(name="sgd", lr=0.3)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (30,), generator=generator)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("most", [None, 1, 4, 100])
def test_steps_are_those_of_torchs_sgd_on_mean_losses(most: int | None) -> None:
    """Batches of 8 out of 30, the last of a pass with 6; in parts, too."""
    (x, y), model, reference = data(), net(), net()
    settings = LocalSettings(steps=9, batch_size=8, optimizer=SGD, max_physical_batch=most)
    train_by_torch(model, loss, x, y, settings, KEY)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    batches = shuffled_batches(30, 8, KEY.generator(Purpose.SAMPLING))
    for _ in range(9):
        batch = next(batches)
        optimizer.zero_grad()
        loss(reference(x[batch]), y[batch]).mean().backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-10, atol=1e-12)


def test_batches_pass_over_every_example_before_repeating_one() -> None:
    seen: list[Tensor] = []

    class Spy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input[:, 0].detach().clone())
            return super().forward(input)

    model = Spy(1, 3).double()
    x = torch.arange(10, dtype=torch.float64).unsqueeze(1)
    settings = LocalSettings(steps=6, batch_size=4, optimizer=SGD)
    train_by_torch(model, loss, x, torch.zeros(10, dtype=torch.long), settings, KEY)
    assert [len(batch) for batch in seen] == [4, 4, 2, 4, 4, 2]
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_masks_are_of_the_clients_stream() -> None:
    """And the global generator is left alone."""
    (x, y), results = data(), []
    settings = LocalSettings(steps=3, batch_size=8, optimizer=SGD)
    for key, disturb in ((KEY, 1), (KEY, 2), (StreamKey(1, 2, 4), 1)):
        model = net(dropout=0.5)
        torch.manual_seed(disturb)
        expected = torch.rand(2)
        torch.manual_seed(disturb)
        train_by_torch(model, loss, x, y, settings, key)
        assert torch.equal(torch.rand(2), expected)
        results.append(flat(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_the_numbers_of_steps_are_those_given() -> None:
    (x, y), models = data(), [net(), net()]
    settings = LocalSettings(steps=3, batch_size=8, optimizer=SGD)
    train_by_torch(models[0], loss, x, y, settings, KEY)
    train_by_torch(models[1], loss, x, y, settings, KEY, steps=range(7, 10))
    assert torch.equal(flat(models[0]), flat(models[1])), "a plain client's batches start anew"
