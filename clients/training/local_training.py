"""Local training of one round: plain SGD, or DP-SGD.

Both update the model's parameters in place, take a fixed number of optimizer steps, and draw all
randomness from the streams of (seed, client, round).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.noise import NoiseSource, SecureNoise, SeededNoise, secret_stream
from fedsim.clients.dp_sgd.per_example.chain import chain_of
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, PerExampleLoss
from fedsim.clients.dp_sgd.per_example.loss_gradient import known_gradient
from fedsim.clients.dp_sgd.sampling import Sampling
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.optimizers import make_optimizer
from fedsim.core.streams import Purpose, generator_of, stream, stream_key, torch_seed


@dataclass(frozen=True)
class StreamKey:
    """Key of every random stream of one client in one round."""

    seed: int
    client: int
    round_number: int

    def key_bytes(self, purpose: Purpose) -> bytes:
        """Return the 32-byte key of the stream for `purpose`."""
        return stream_key(self.seed, purpose, client=self.client, round_number=self.round_number)

    def generator(self, purpose: Purpose) -> np.random.Generator:
        """Return the stream for `purpose`."""
        return generator_of(self.key_bytes(purpose))

    def epoch(self, number: int) -> np.random.Generator:
        """Return the stream that divides the client's examples in an epoch; no round enters it."""
        return stream(self.seed, Purpose.EPOCH, client=self.client, round_number=number)

    def lots(
        self, sampling: Sampling, num_examples: int, *, first_step: int, secure: bool = False
    ) -> Iterator[np.ndarray]:
        """Return the lots of the round, without end.

        Args:
            sampling: draws the lots.
            num_examples: examples of the client.
            first_step: steps of the client before this round.
            secure: whether independent lots are drawn from the operating system.
        """
        steps = secret_stream() if secure else self.generator(Purpose.SAMPLING)
        return sampling.lots(num_examples, steps, epochs=self.epoch, first_step=first_step)

    def noise(self, *, secure: bool = False) -> NoiseSource:
        """Return the noise source of the round.

        Args:
            secure: whether noise comes from the operating system and cannot be repeated.
        """
        return SecureNoise() if secure else SeededNoise(self.key_bytes(Purpose.NOISE))

    def torch_seed(self, purpose: Purpose) -> int:
        """Return a seed for torch's own generators (dropout)."""
        return torch_seed(self.key_bytes(purpose))


def train_plain(
    model: nn.Module,
    loss: PerExampleLoss,
    features: Tensor,
    targets: Tensor,
    settings: LocalSettings,
    key: StreamKey,
    *,
    steps: range | None = None,
) -> None:
    """Take steps of minibatch SGD on the mean loss, in place.

    Batches follow a shuffled order of the client's examples, shuffled anew in each pass. A pass
    ends with a smaller batch where batch_size does not divide the number of examples.

    Args:
        model: updated in place.
        loss: one value per example.
        features: the client's examples (n, ...).
        targets: their targets (n, ...).
        settings: batch size, optimizer, and the number of steps.
        key: of the client's random streams.
        steps: numbers of the steps to take; None: `settings.steps` of them.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(settings.optimizer)
    batches = shuffled_batches(len(features), settings.batch_size, key.generator(Purpose.SAMPLING))
    gradient_of = _mean_gradient_function(model, loss, trainable, settings.max_physical_batch)
    model.train()
    with seeded_torch(key, features.device):
        for _ in steps if steps is not None else range(settings.steps):
            index = torch.from_numpy(next(batches)).to(features.device)
            found = gradient_of(features.index_select(0, index), targets.index_select(0, index))
            optimizer.step(trainable, found)


def _mean_gradient_function(
    model: nn.Module, loss: PerExampleLoss, trainable: list[nn.Parameter], max_examples: int | None
) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
    """Return the function that computes the gradients of a batch's mean loss.

    Known layers run without autograd. With `max_examples`, gradients are summed over parts of at
    most so many examples.
    """

    def by_torch(x: Tensor, y: Tensor) -> Sequence[Tensor]:
        if max_examples is None or len(x) <= max_examples:
            return _gradient(loss(model(x), y).mean(), trainable)
        total = [torch.zeros_like(parameter) for parameter in trainable]
        for part, wanted in zip(x.split(max_examples), y.split(max_examples), strict=True):
            share = loss(model(part), wanted).sum() / len(x)
            for value, found in zip(total, _gradient(share, trainable), strict=True):
                value += found
        return total

    chain = chain_of(model, {id(parameter): i for i, parameter in enumerate(trainable)})
    known = known_gradient(loss)  # of another loss, only autograd has it
    if max_examples is not None or known is None or chain is None or not chain.sums_gradients:
        return by_torch
    return lambda x, y: chain.mean_gradients(x, y, known)


def _gradient(value: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)


def train_private(
    gradients: PerExampleGradients,
    features: Tensor,
    targets: Tensor,
    settings: LocalSettings,
    step: DpSgdMechanism,
    key: StreamKey,
    *,
    steps: range,
    secure: bool = False,
) -> DpSgdMechanism:
    """Take DP-SGD steps on the model of `gradients`, in place.

    Guarantee: the resulting parameters, and the adapted clipping bound, are a function of the
    initial ones and of `len(steps)` releases of `step`. The optimizer sees nothing but noisy
    gradients. Buffers do not change.

    Args:
        gradients: the model and its per-example gradients.
        features: the client's examples (n, ...).
        targets: their targets (n, ...).
        settings: the optimizer.
        step: the mechanism.
        key: of the client's random streams.
        steps: numbers of the charged steps, counted over the client's whole life.
        secure: whether lots and noise come from the operating system instead of `key`.

    Returns:
        The mechanism of the next step, with the adapted clipping bound.
    """
    values = gradients.parameters.data
    released = torch.empty_like(values)
    optimizer = make_optimizer(settings.optimizer)
    gradients.model.train()
    lots = key.lots(step.sampling, len(features), first_step=steps.start, secure=secure)
    noise = key.noise(secure=secure)
    with seeded_torch(key, features.device):
        for _ in steps:
            seen = step.release(gradients, features, targets, lots=lots, noise=noise, into=released)
            optimizer.step([values], [released])
            step = step.adapt(seen, noise)
    return step


def shuffled_batches(
    num_examples: int, batch_size: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the indices of batches without end, shuffled anew in each pass.

    Args:
        num_examples: examples in a pass.
        batch_size: examples in a batch; the last one of a pass may be smaller.
        generator: of the shuffles.
    """
    while True:
        order = generator.permutation(num_examples)
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]


@contextmanager
def seeded_torch(key: StreamKey, device: torch.device) -> Iterator[None]:
    """Seed torch's generator (dropout) from the client's stream, and restore it afterwards."""
    seed = key.torch_seed(Purpose.DROPOUT)
    if device.type != "cpu":
        with torch.random.fork_rng(devices=[device]):
            torch.manual_seed(seed)
            yield
        return
    # As above, without torch's record of the caller, which takes longer than a small step.
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
