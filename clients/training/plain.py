"""Training without privacy by torch's autograd, for models without per-example gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.algorithms.algorithm import ClientRule
from fedsim.clients.gradients.per_example import PerExampleLoss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.training.member import (
    Block,
    BlockMember,
    BlockResult,
    StepCallback,
    StreamKey,
    seeded_torch,
    with_releases,
)
from fedsim.clients.training.shared_model import LocalOptimizer, SharedModel, make_optimizer
from fedsim.core.streams import Purpose


def train_by_torch(
    model: nn.Module,
    loss: PerExampleLoss,
    features: Tensor,
    targets: Tensor,
    settings: LocalSettings,
    key: StreamKey,
    *,
    steps: range | None = None,
    optimizer: LocalOptimizer | None = None,
    change: Callable[[Sequence[Tensor]], None] | None = None,
) -> None:
    """Train a model in place by minibatch steps on the mean loss.

    The function `batches_of` draws the batches.

    Args:
        model: the model, updated in place.
        loss: function of (outputs, targets) that returns one value per example.
        features: features of the client's examples (n, ...).
        targets: targets of the client's examples (n, ...).
        settings: settings with batch size, optimizer, and number of steps.
        key: key of the client's random streams.
        steps: the steps to take; None for `settings.steps` steps.
        optimizer: optimizer to use; None for the one in the settings.
        change: function that changes the gradients of a step in place; None for no change.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    values = [parameter.detach() for parameter in trainable]
    optimizer = optimizer or make_optimizer(settings.optimizer_in(key.round_number))
    batches = batches_of(settings, len(features), key)
    views, most = key.views(settings), settings.max_physical_batch
    model.train()
    with seeded_torch(key, features.device):
        for number in range(settings.given_steps if steps is None else len(steps)):
            batch = next(batches)
            index = torch.from_numpy(batch).to(features.device)
            x, y = features.index_select(0, index), targets.index_select(0, index)
            if views is not None:  # the mean over an example's views is a mean over all rows
                x, y = views.draw(x, batch, number), y.repeat_interleave(views.number, 0)
            rows = most if most is None or views is None else most * views.number
            gradients = _mean_gradient(model, loss, x, y, trainable, rows)
            if change is not None:
                change(gradients)
            optimizer.step(values, gradients)


def by_tensor(
    rule: ClientRule, shared_model: SharedModel, sent: Mapping[str, Tensor]
) -> Callable[[Sequence[Tensor]], None]:
    """Return a function that changes the gradients of a step as the federated algorithm requires.

    The function takes a list with the gradient of each trained tensor, and changes it in place.

    Args:
        rule: the rule by which the algorithm changes gradients.
        shared_model: the model, with the global model loaded.
        sent: flat arrays (size,) that the algorithm sends beside the model, by name.
    """
    tensors = shared_model.parameters.tensors
    places = shared_model.parameters.slices(range(len(tensors)))
    start = shared_model.start_values.clone()

    @torch.no_grad()
    def change(gradients: Sequence[Tensor]) -> None:
        for tensor, place, gradient in zip(tensors, places, gradients, strict=True):
            arrays = {name: flat[place].view_as(tensor) for name, flat in sent.items()}
            rule.change_(gradient, tensor, start[place].view_as(tensor), arrays)

    return change


def _mean_gradient(
    model: nn.Module,
    loss: PerExampleLoss,
    x: Tensor,
    y: Tensor,
    trainable: Sequence[Tensor],
    most: int | None,
) -> Sequence[Tensor]:
    """Return the gradients of a batch's mean loss, computed on at most `most` examples at once."""
    if most is None or len(x) <= most:
        return _gradient(loss(model(x), y).mean(), trainable)
    total = [torch.zeros_like(parameter) for parameter in trainable]
    for part, wanted in zip(x.split(most), y.split(most), strict=True):
        share = loss(model(part), wanted).sum() / len(x)
        for value, gradient in zip(total, _gradient(share, trainable), strict=True):
            value += gradient
    return total


def _gradient(value: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)


def batches_of(settings: LocalSettings, num_examples: int, key: StreamKey) -> Iterator[np.ndarray]:
    """Return an endless iterator over a client's batches, each an array of example indices.

    The examples are shuffled anew in each pass and cut into batches. The last batch of a pass is
    smaller if batch_size does not divide the number of examples. With `batch_size: full` every
    batch is all examples, in order.

    Args:
        settings: local settings with the batch size.
        num_examples: number of the client's examples.
        key: key of the client's random streams.
    """
    if settings.batch_size == "full":
        return repeat(np.arange(num_examples))
    return shuffled_batches(num_examples, settings.batch_size, key.generator(Purpose.SAMPLING))


def shuffled_batches(
    num_examples: int, batch_size: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield batches of example indices without end; each pass shuffles the examples anew.

    Args:
        num_examples: number of examples.
        batch_size: number of examples in a batch; the last batch of a pass may be smaller.
        generator: random generator that shuffles the examples.
    """
    while True:
        order = generator.permutation(num_examples)
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]


class TorchBlock(Block):
    """Block of a single client, trained by torch's autograd without per-example clipping."""

    def __init__(
        self,
        shared_model: SharedModel,
        loss: PerExampleLoss,
        local: LocalSettings,
        member: BlockMember,
        rule: ClientRule | None,
    ) -> None:
        super().__init__(shared_model, [member])
        self._loss, self._local, self._member, self._rule = loss, local, member, rule

    def train(self, on_step: StepCallback | None = None) -> BlockResult:
        """Take all steps of the client, and return the trained parameters in a `BlockResult`.

        Under client-level privacy, the update is clipped and gets noise.
        """
        shared_model, member, rule = self.shared_model, self._member, self._rule
        train_by_torch(
            shared_model.model,
            self._loss,
            member.features,
            member.targets,
            self._local,
            member.key,
            steps=member.steps,
            change=None if rule is None else by_tensor(rule, shared_model, member.sent),
        )
        values = shared_model.parameters.data.unsqueeze(0).clone()
        return with_releases(BlockResult(values, (None,), (None,)), shared_model, self.members)
