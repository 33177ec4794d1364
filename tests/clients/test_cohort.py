"""A cohort releases for each client what the client would release alone."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.cohort import Cohort, Member
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.noise import SeededNoise
from fedsim.clients.dp_sgd.per_example import BookKeeping, UncoveredParameterError
from fedsim.clients.dp_sgd.sampling import PoissonSampling

CLIENTS = 4


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.place = nn.Parameter(torch.randn(5, 6))
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.mix.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.table(x) + self.place)
        return self.head(torch.tanh(self.mix(hidden)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


MODELS = {"mlp": (mlp, (6,)), "cnn": (cnn, (2, 6, 6)), "tokens": (Tokens, (5,))}


def example_data(shape: tuple[int, ...], client: int, *, tokens: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    n = 12 + 5 * client
    targets = torch.randint(0, 3, (n,), generator=generator)
    if tokens:
        return torch.randint(0, 7, (n, *shape), generator=generator), targets
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64), targets


def member(client: int, shape: tuple[int, ...], *, tokens: bool, z: float = 1.0) -> Member:
    x, y = example_data(shape, client, tokens=tokens)
    step = DpSgdStep(
        PoissonSampling(0.2 + 0.15 * client), FlatClipping(0.3 + 0.4 * client), z, 3.0 + client
    )
    streams = [np.random.default_rng((client, purpose)) for purpose in (1, 2)]
    return Member(step, x, y, streams[0], SeededNoise(streams[1]))


@pytest.mark.parametrize("name", MODELS)
def test_a_cohort_equals_one_client_at_a_time(name: str) -> None:
    make, shape = MODELS[name]
    tokens = name == "tokens"
    torch.manual_seed(0)
    model = make().double()
    alone = []
    for client in range(CLIENTS):
        own = make().double()
        own.load_state_dict(model.state_dict())
        gradients = BookKeeping(own, cross_entropy)
        optimizer_parameter = gradients.parameters.optimizer_parameter()
        optimizer_parameter.grad = into = torch.zeros_like(gradients.parameters.data)
        optimizer = torch.optim.Adam([optimizer_parameter], lr=0.05)
        one = member(client, shape, tokens=tokens)
        for _ in range(4):
            one.step.release(
                gradients, one.features, one.targets, lots=one.lots, noise=one.noise, into=into
            )
            optimizer.step()
        alone.append(gradients.parameters.data)
    cohort = Cohort(model, cross_entropy, clients=CLIENTS)
    stacked = cohort.optimizer_parameter()
    stacked.grad = released = torch.zeros_like(cohort.values)
    optimizer = torch.optim.Adam([stacked], lr=0.05)
    members = [member(client, shape, tokens=tokens) for client in range(CLIENTS)]
    for _ in range(4):
        cohort.release(members, released)
        optimizer.step()
    torch.testing.assert_close(cohort.values, torch.stack(alone), rtol=1e-9, atol=1e-10)


def test_no_client_sees_another() -> None:
    """A change of one client's data, NaN included, leaves the others' releases as they were."""
    releases = []
    for poison in (0.0, 1e6, float("nan")):
        torch.manual_seed(0)
        cohort = Cohort(mlp().double(), cross_entropy, clients=CLIENTS)
        members = [member(client, (6,), tokens=False) for client in range(CLIENTS)]
        members[2].features[:] += poison
        into = torch.zeros_like(cohort.values)
        cohort.release(members, into)
        assert torch.isfinite(into).all()
        releases.append(into)
    others = [0, 1, 3]
    for changed in releases[1:]:
        torch.testing.assert_close(changed[others], releases[0][others], rtol=1e-12, atol=0)
        assert not torch.equal(changed[2], releases[0][2])


def test_empty_lots_release_noise() -> None:
    cohort = Cohort(mlp().double(), cross_entropy, clients=2)
    members = []
    for client in range(2):
        step = DpSgdStep(PoissonSampling(0.0), FlatClipping(1.0), 1.0, 5.0)
        x, y = example_data((6,), client, tokens=False)
        streams = [np.random.default_rng((client, purpose)) for purpose in (1, 2)]
        members.append(Member(step, x, y, streams[0], SeededNoise(streams[1])))
    into = torch.zeros_like(cohort.values)
    cohort.release(members, into)
    assert (into != 0).all()
    assert not torch.equal(into[0], into[1])


def test_what_has_no_batched_rule_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    for model, message in ((Twice(), "used twice"), (Bare(), "how w is used")):
        cohort = Cohort(model.double(), cross_entropy, clients=1)
        into = torch.zeros_like(cohort.values)
        with pytest.raises(UncoveredParameterError, match=message):
            cohort.release([member(3, (6,), tokens=False)], into)


def test_a_cohort_needs_its_members() -> None:
    with pytest.raises(ValueError, match="at least one client, got 0"):
        Cohort(mlp(), cross_entropy, clients=0)
    cohort = Cohort(mlp().double(), cross_entropy, clients=2)
    with pytest.raises(ValueError, match="need 2 members, got 1"):
        cohort.release([member(0, (6,), tokens=False)], torch.zeros_like(cohort.values))
