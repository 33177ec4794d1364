"""Promise: with `unit: client`, everything of a client reaches others through its release alone.

The attacker is the server, which sees every upload. If one bit of another client's update changed
with the data of client 3, its noise would hide nothing: the server knows the other clients' data.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.app import one_thread
from fedsim.clients.gradients.per_example import PaddedBatch
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.clients.model_checks.bit_isolation import MemberIsolation
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, BlockResult, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.data.examples import Examples
from fedsim.data.load import ClientExamples
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.models.losses import cross_entropy
from fedsim.protocol.arrays import to_arrays

EXPERIMENT: dict[str, Any] = {
    "name": "hidden",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 30}},
    "model": {"name": "mlp", "args": {"hidden": [16]}},
    "federation": {"rounds": 1},
    "local": {"steps": 3, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"unit": "client", "noise_multiplier": 1.0, "delta": 0.01, "max_update_norm": 0.5},
}
ATTACKED = 3


def with_data(federation: Federation, examples: Examples) -> Federation:
    """Return a federation in which one client has other examples."""
    clients = federation.data.clients
    own = [examples if k == ATTACKED else clients[k] for k in range(len(clients))]
    ends = np.cumsum([0, *(len(each) for each in own)])
    source = Examples(
        np.concatenate([np.asarray(each.features, np.float32) for each in own]),
        np.concatenate([np.asarray(each.targets, np.int64) for each in own]),
    )
    rows = {k: np.arange(ends[k], ends[k + 1]) for k in range(len(own))}
    return replace(federation, data=replace(federation.data, clients=ClientExamples(source, rows)))


def other_data(federation: Federation) -> dict[str, Examples]:
    own = federation.data.clients[ATTACKED]
    x, y = np.asarray(own.features, np.float32), np.asarray(own.targets, np.int64)
    return {
        "none": Examples(x[:0], y[:0]),
        "one": Examples(x[:1], y[:1]),
        "three times": Examples(np.concatenate([x] * 3), np.concatenate([y] * 3)),
        "large": Examples(x * np.float32(1e30), y),
    }


def train(federation: Federation, block: tuple[int, ...]) -> BlockResult:
    members: list[BlockMember | None] = []
    for client in block:
        task = federation.client_task(client)
        assert task.privacy is not None
        steps = range((task.training.local.steps or 0) if task.data.size else 0)
        members.append(
            BlockMember(
                *task.data.tensors(),
                StreamKey(0, client, 1),
                steps,
                release=task.privacy.release,
            )
        )
    with one_thread():
        return block_of(
            federation.model.shared,
            federation.model.loss,
            federation.model.gradients,
            federation.experiment.local,
            members,
            rows=federation.blocks.rows(block),
            places=federation.blocks.places,
        ).train()


@pytest.mark.parametrize("batch_size", [20, 200, "full"])
def test_no_bit_of_another_client_depends_on_its_data(batch_size: int | str) -> None:
    loaded = load_experiment(EXPERIMENT, overrides={"local.batch_size": batch_size})
    federation = assemble(loaded, ledger=None)
    federation.model.shared.load(federation.initial_arrays())
    block = federation.blocks.plan.block_of(1, ATTACKED)
    assert len(block) > 1
    place = block.index(ATTACKED)
    others = [k for k in range(len(block)) if k != place]
    expected = train(federation, block).values
    for name, examples in other_data(federation).items():
        changed = with_data(federation, examples)
        assert changed.blocks.plan.blocks(1) == federation.blocks.plan.blocks(1), name
        assert changed.blocks.rows(block) == federation.blocks.rows(block), name
        found = train(changed, block).values
        assert not torch.equal(found[place], expected[place]), name
        assert torch.equal(found[others], expected[others]), name
        assert bool(found.isfinite().all()), name
    absent = train(federation, block[:place] + block[place + 1 :]).values
    assert torch.equal(absent, expected[others])


class Remembers(nn.Module):
    """Keeps a sum of its inputs in buffers that are no part of its state."""

    total: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(4), persistent=False)
        self.register_buffer("replaced", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        self.replaced = self.replaced + x.detach().sum(0)
        return self.layer(x + self.total + self.replaced)


def test_nothing_stays_in_a_model_that_clients_share() -> None:
    torch.manual_seed(0)
    shared, local = SharedModel(Remembers()), LocalSettings(steps=2, batch_size=4)
    shared.load(to_arrays({k: v.numpy() for k, v in shared.model.state_dict().items()}))
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))

    def update_of(features: Tensor, client: int) -> Tensor:
        update = UpdateMechanism(1.0, 1.0).for_model(shared.parameters)
        member = BlockMember(features, y, StreamKey(0, client, 1), range(2), update)
        return block_of(shared, cross_entropy, None, local, [member]).train().values

    found = []
    for scale in (1.0, 3.0):
        update_of(scale * x, ATTACKED)
        found.append(update_of(x, 4))
    assert torch.equal(*found)


class Coupled(RuleGradients):
    """Gradients that add a little of all clients to each."""

    def add_sums(self, values: Tensor, padded: PaddedBatch, into: Tensor) -> None:
        super().add_sums(values, padded, into)
        into += 1e-9 * into.nan_to_num().sum()


class Placed(RuleGradients):
    """Gradients that add a little in the first place."""

    def add_sums(self, values: Tensor, padded: PaddedBatch, into: Tensor) -> None:
        super().add_sums(values, padded, into)
        into[0] *= 1 + 1e-6


def test_blocks_that_couple_clients_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(6, 8), torch.randint(0, 3, (6,))
    MemberIsolation(RuleGradients(model, cross_entropy), x, y).check(4, 8)
    coupled = MemberIsolation(Coupled(model, cross_entropy), x, y)
    coupled.check(1, 8)  # a client alone
    with pytest.raises(UnsafeModelError, match=r"local\.vectorized_clients: off"):
        coupled.check(4, 8)
    placed = MemberIsolation(Placed(model, cross_entropy), x, y)
    with pytest.raises(
        UnsafeModelError, match=r"the place of another.*local\.vectorized_clients: off"
    ):
        placed.check(4, 8)
