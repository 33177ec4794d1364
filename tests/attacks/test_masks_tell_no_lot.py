"""Masks inside a model do not tell who was drawn.

They came from the public seed, by place in the batch, also under `noise: secure`: whether an
example was drawn moved all masks behind it, and 39 of 39 masks of a secret batch were predicted.
The release of a step was then no Poisson sample of one Gaussian: 1.687 was printed where at least
2.012 was true (δ = 0.01).
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey, seeded_torch
from fedsim.clients.training.shared_model import SharedModel

N, WIDTH = 40, 64
LOCAL = LocalSettings.model_validate(
    {"steps": 1, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 1.0}}
)


class Watched(nn.Module):
    """Keeps the masks of its passes: every feature of example i is i + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1, bias=False)
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(x, 0.5, self.training)
        for row, mask in zip(x[:, 0].tolist(), kept > 0, strict=True):
            if row:
                self.masks[int(row) - 1] = mask
        return self.layer(kept)


def masks_of(
    monkeypatch: pytest.MonkeyPatch, batch: Sequence[int], *, secure: bool
) -> dict[int, Tensor]:
    """Return the masks of a step with a given batch, by example."""
    model = Watched()
    gradients = RuleGradients(model, lambda outputs, targets: (outputs - targets).square().sum(1))
    step = DpSgdMechanism(PoissonSampling(0.5), FlatClipping(1.0), 1.0, 20.0, largest_batch=N)
    step = step.for_model(gradients.parameters)
    x = torch.arange(1.0, N + 1)[:, None].expand(N, WIDTH).contiguous()
    key = StreamKey(7, 0, 1)
    member = BlockMember(x, torch.zeros(N, 1), key, range(1), step, secure)
    with monkeypatch.context() as patch:
        patch.setattr(StreamKey, "draw_batches", lambda *_, **__: iter([np.array(batch)]))
        shared = SharedModel(model, parameters=gradients.parameters)
        block_of(shared, gradients.loss, gradients, LOCAL, [member]).train()
    return model.masks


def test_an_example_more_or_less_moves_no_other_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = list(range(0, N, 2))
    whole = masks_of(monkeypatch, batch, secure=False)
    less = masks_of(monkeypatch, batch[1:], secure=False)
    assert len(less) == len(batch) - 1
    for example, mask in less.items():
        assert torch.equal(whole[example], mask)
    assert len({tuple(mask.tolist()) for mask in whole.values()}) == len(batch)


def test_masks_under_secure_noise_do_not_follow_from_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guesses by the seed: by place, as before, by example, and by a second run.

    A mask of 64 bits is met by chance with probability 2^-64.
    """
    batch = list(range(1, N, 2))
    secret = masks_of(monkeypatch, batch, secure=True)
    guesses = [masks_of(monkeypatch, batch, secure=secure) for secure in (False, True)]
    with seeded_torch(StreamKey(7, 0, 1), torch.device("cpu")):
        ones = torch.ones(24, WIDTH)
        kept = nn.functional.dropout(ones, 0.5) > 0
    guesses.append(dict(zip(batch, kept, strict=False)))
    for guess in guesses:
        assert guess.keys() == secret.keys()
        assert not any(torch.equal(secret[i], guess[i]) for i in batch)


def test_numbers_that_a_model_draws_later_are_refused() -> None:
    class Later(nn.Module):
        draws = False

        def forward(self, x: Tensor) -> Tensor:
            return x + (torch.rand(1) if self.draws else 0.0)

    model = nn.Sequential(Later(), nn.Linear(3, 1))
    gradients = RuleGradients(model, lambda outputs, targets: (outputs - targets).square().sum(1))
    step = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(1.0), 1.0, 9.0, largest_batch=9)
    step = step.for_model(gradients.parameters)
    member = BlockMember(torch.ones(9, 3), torch.zeros(9, 1), StreamKey(0, 0, 1), range(1), step)
    shared = SharedModel(model, parameters=gradients.parameters)
    block_of(shared, gradients.loss, gradients, LOCAL, [member]).train()
    Later.draws = True
    with pytest.raises(UnsafeModelError, match="cannot be keyed by example"):
        block_of(shared, gradients.loss, gradients, LOCAL, [member]).train()
