from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example.UNKNOWN import VmapGradients
from fedsim.clients.dp_sgd.sampling import (
    BallsAndBins,
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
    ShuffledEpochs,
)
from fedsim.clients.settings import AdamSettings, LocalSettings, SgdSettings
from fedsim.clients.training.block import train_private
from fedsim.clients.training.plain import train_plain
from fedsim.clients.training.streams import StreamKey

KEY = StreamKey(seed=1, client=2, round_number=3)
EXACT = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(1e9), 0.0, expected_lot=30.0)
NOISY = DpSgdMechanism(PoissonSampling(0.2), FlatClipping(1.0), 1.0, expected_lot=6.0)


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


def private_training(
    model: nn.Module,
    settings: LocalSettings,
    step: DpSgdMechanism,
    key: StreamKey = KEY,
    *,
    first_step: int = 0,
    secure: bool = False,
) -> None:
    x, y = data()
    gradients = VmapGradients(model, loss)
    steps = range(first_step, first_step + settings.steps)
    train_private(gradients, x, y, settings, step, key, steps=steps, secure=secure)


OPTIMIZERS = {
    "sgd": SgdSettings(name="sgd", lr=0.3),
    "momentum": SgdSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": AdamSettings(name="adam", lr=0.01, weight_decay=0.01),
    "adamw": AdamSettings(name="adamw", lr=0.01, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_clipping_both_ways_are_full_batch_gradient_descent(name: str) -> None:
    settings = LocalSettings(steps=10, batch_size=30, optimizer=OPTIMIZERS[name])
    x, y = data()
    reference = net()
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {
        key: value for key, value in settings.optimizer.model_dump().items() if key != "name"
    }
    optimizer = kinds.get(name, torch.optim.SGD)(reference.parameters(), **options)
    for _ in range(10):
        optimizer.zero_grad()
        loss(reference(x), y).mean().backward()
        optimizer.step()
    plain, private = net(), net()
    train_plain(plain, loss, x, y, settings, KEY)
    private_training(private, settings, EXACT)
    torch.testing.assert_close(flat(plain), flat(reference), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(private), flat(reference), rtol=1e-9, atol=1e-11)


def test_noise_differs_between_seeds_clients_rounds_and_nothing_else() -> None:
    settings = LocalSettings(steps=3, batch_size=6, optimizer=OPTIMIZERS["sgd"])

    def trained(key: StreamKey, disturb: int) -> Tensor:
        model = net(dropout=0.3)
        torch.manual_seed(disturb)
        private_training(model, settings, NOISY, key)
        return flat(model)

    base = trained(KEY, 1)
    torch.testing.assert_close(trained(KEY, 2), base, rtol=0, atol=0)
    for other in (StreamKey(2, 2, 3), StreamKey(1, 3, 3), StreamKey(1, 2, 4)):
        assert not torch.equal(trained(other, 1), base)


@pytest.mark.parametrize("private", [True, False])
def test_training_leaves_the_global_generators_alone(private: bool) -> None:
    settings = LocalSettings(steps=2, batch_size=6, optimizer=OPTIMIZERS["sgd"])
    (x, y), model = data(), net(dropout=0.5)
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002  the global generator is what must stay untouched
    expected = (torch.rand(2), np.random.rand(2))  # noqa: NPY002
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    if private:
        private_training(model, settings, NOISY)
    else:
        train_plain(model, loss, x, y, settings, KEY)
    torch.testing.assert_close(torch.rand(2), expected[0])
    np.testing.assert_array_equal(np.random.rand(2), expected[1])  # noqa: NPY002


def test_plain_batches_pass_over_every_example_before_repeating_one() -> None:
    seen: list[Tensor] = []

    class Spy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input[:, 0].detach().clone())
            return super().forward(input)

    model = Spy(1, 3).double()
    x = torch.arange(10, dtype=torch.float64).unsqueeze(1)
    settings = LocalSettings(steps=6, batch_size=4, optimizer=OPTIMIZERS["sgd"])
    train_plain(model, loss, x, torch.zeros(10, dtype=torch.long), settings, KEY)
    assert [len(batch) for batch in seen] == [4, 4, 2, 4, 4, 2]
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_an_empty_lot_is_a_step_of_noise() -> None:
    # Rate 0 draws empty lots only; every step must still move the parameters.
    step = replace(NOISY, sampling=PoissonSampling(0.0))
    settings = LocalSettings(steps=4, batch_size=6, optimizer=SgdSettings(name="sgd", lr=1.0))
    model = net()
    private_training(model, settings, step)
    moved = flat(model) - flat(net())
    assert (moved != 0).all()
    expected = KEY_NOISE_STD * np.sqrt(4) / 6.0
    # 75 parameters: five standard errors of a standard deviation.
    assert abs(moved.std().item() / expected - 1) < 5 / np.sqrt(2 * moved.numel())


KEY_NOISE_STD = 1.0


@dataclass(frozen=True)
class Recorded(Sampling):
    """Remembers the lots that training drew."""

    inner: Sampling
    seen: list[list[int]]

    @property
    def sampling_rate(self) -> float:
        return self.inner.sampling_rate

    @classmethod
    def for_client(cls, num_examples, batch_size, *, sampling_rate=None):
        raise NotImplementedError

    def event(self, mechanism):
        return self.inner.event(mechanism)

    def charges(self, mechanism, first_step, steps):
        return self.inner.charges(mechanism, first_step, steps)

    def lots(self, num_examples, stream, *, epochs, first_step) -> Iterator[np.ndarray]:
        for lot in self.inner.lots(num_examples, stream, epochs=epochs, first_step=first_step):
            self.seen.append(lot.tolist())
            yield lot


def lots_of_rounds(sampling: Sampling, steps: int, rounds: int, **options: bool) -> list[list[int]]:
    settings = LocalSettings(steps=steps, batch_size=6, optimizer=OPTIMIZERS["sgd"])
    recorded = Recorded(sampling, [])
    for number in range(rounds):
        key = replace(KEY, round_number=number + 1)
        step = replace(NOISY, sampling=recorded)
        private_training(net(), settings, step, key, first_step=steps * number, **options)
    return recorded.seen


@pytest.mark.parametrize("sampling", [ShuffledEpochs(5), BallsAndBins(5)])
def test_epochs_go_on_over_rounds(sampling: Sampling) -> None:
    lots = lots_of_rounds(sampling, steps=2, rounds=5)
    for epoch in (lots[:5], lots[5:]):
        assert sorted(i for lot in epoch for i in lot) == list(range(30))
    assert lots[:5] != lots[5:]


@pytest.mark.parametrize("sampling", [PoissonSampling(0.2), FixedSizeSampling(30, 6)])
def test_independent_lots_differ_between_rounds(sampling: Sampling) -> None:
    lots = lots_of_rounds(sampling, steps=3, rounds=3)
    assert len(lots) == 9
    assert len({tuple(lot) for lot in lots}) == 9


def test_secure_training_repeats_neither_lots_nor_noise() -> None:
    first, again = (
        lots_of_rounds(PoissonSampling(0.2), steps=9, rounds=1, secure=True) for _ in range(2)
    )
    assert first != again
    models = [net(), net()]
    settings = LocalSettings(steps=1, batch_size=6, optimizer=OPTIMIZERS["sgd"])
    step = replace(NOISY, sampling=PoissonSampling(0.0))
    for model in models:
        private_training(model, settings, step, secure=True)
    assert not torch.equal(flat(models[0]), flat(models[1]))


def test_the_lots_of_poisson_sampling_are_those_of_the_round_s_stream() -> None:
    """Fixes the meaning of a seed: what a run drew, it draws again in every later version."""
    lots = islice(KEY.lots(PoissonSampling(0.2), 30, first_step=15), 3)
    assert [lot.tolist() for lot in lots] == [
        [0, 4, 5, 16, 27],
        [1, 2, 6, 8, 11, 17, 19, 26],
        [0, 2, 3, 6, 10, 21, 23],
    ]
