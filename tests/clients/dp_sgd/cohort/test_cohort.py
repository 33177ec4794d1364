"""A cohort trains each client as the client trains alone: on the CPU, to the bit."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import AutomaticClipping, Clipping, FlatClipping, GroupClipping
from fedsim.clients.dp_sgd.cohort import Cohort, Member, PlainCohort, PrivateCohort, base
from fedsim.clients.dp_sgd.cohort.ragged import Apart, Ragged, Together
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.noise import SeededNoise
from fedsim.clients.dp_sgd.per_example.clipped_sum import BookKeeping, UncoveredParameterError
from fedsim.clients.dp_sgd.sampling import PoissonSampling
from fedsim.clients.settings import AdamSettings
from fedsim.clients.training.optimizers import make_optimizer
from fedsim.core.streams import Purpose, stream_key

CLIENTS = 9
ADAM = AdamSettings(name="adam", lr=0.05)


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
    return nn.Sequential(nn.Linear(6, 33), nn.ReLU(inplace=True), nn.Linear(33, 3))


def wide() -> nn.Module:
    """Too many values to be brought together by length."""
    return nn.Sequential(nn.Linear(100, 350), nn.Tanh(), nn.Linear(350, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def images() -> nn.Module:
    """Its convolutions are products with patches, by channel and by place."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 16, 2, 2),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


MODELS = {
    "images": (images, (1, 9, 9)),
    "mlp": (mlp, (6,)),
    "wide": (wide, (100,)),
    "cnn": (cnn, (2, 6, 6)),
    "tokens": (Tokens, (5,)),
}


def example_data(shape: tuple[int, ...], client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    n = 12 + 5 * (client // 2)  # some clients are alike
    targets = torch.randint(0, 3, (n,), generator=generator)
    if shape == (5,):
        return torch.randint(0, 7, (n, *shape), generator=generator), targets
    return torch.randn(n, *shape, generator=generator), targets


def clipping_of(kind: str, bound: float) -> Clipping:
    if kind == "layers":
        return GroupClipping(bound, bounds="by_dimension")
    return AutomaticClipping(bound) if kind == "automatic" else FlatClipping(bound)


def streams_of(client: int) -> tuple[np.random.Generator, SeededNoise]:
    noise = SeededNoise(stream_key(0, Purpose.NOISE, client=client))
    return np.random.default_rng(client), noise


def member(client: int, shape: tuple[int, ...], *, clipping: str = "flat") -> Member:
    x, y = example_data(shape, client)
    rate = (0.0, 1.0, 1.0, 0.3, 0.5, 0.8)[client % 6]
    rule = clipping_of(clipping, 0.3 + 0.4 * client)
    step = DpSgdMechanism(PoissonSampling(rate), rule, 1.0, 3.0 + client)
    return Member(step, x, y, *streams_of(client))


def alone(make: Callable[[], nn.Module], one: Member, *, steps: int = 4) -> Tensor:
    torch.manual_seed(0)
    gradients = BookKeeping(make(), cross_entropy)
    into, optimizer = torch.empty_like(gradients.parameters.data), make_optimizer(ADAM)
    assert one.step is not None
    assert one.noise is not None
    for _ in range(steps):
        one.step.release(
            gradients, one.features, one.targets, lots=one.lots, noise=one.noise, into=into
        )
        optimizer.step([gradients.parameters.data], [into])
    return gradients.parameters.data


def train(cohort: Cohort, *, steps: int) -> None:
    optimizers = [make_optimizer(ADAM) for _ in range(cohort.parts)]
    for _ in range(steps):
        for (values, gradient), optimizer in zip(cohort.gradients(), optimizers, strict=True):
            optimizer.step([values], [gradient])


def together(make: Callable[[], nn.Module], members: list[Member], *, steps: int = 4) -> Tensor:
    torch.manual_seed(0)
    cohort = PrivateCohort(make(), cross_entropy, members)
    train(cohort, steps=steps)
    return cohort.values[:, : cohort.size]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clipping", ["flat", "layers", "automatic"])
@pytest.mark.parametrize("small", [True, False])
def test_a_cohort_equals_one_client_at_a_time(
    name: str, clipping: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brought together by the lengths of their lots, or one gradient after the other."""
    if not small:
        monkeypatch.setattr(base, "FEW_VALUES", 0)
    make, shape = MODELS[name]
    values = together(make, [member(k, shape, clipping=clipping) for k in range(CLIENTS)])
    for client in range(CLIENTS):
        assert torch.equal(values[client], alone(make, member(client, shape, clipping=clipping)))


def batches(client: int, n: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(client)
    while True:
        yield generator.permutation(n)[: 4 + client // 2]


@pytest.mark.parametrize("small", [True, False])
def test_a_cohort_without_privacy_equals_one_client_at_a_time(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(base, "FEW_VALUES", 0)
    torch.manual_seed(0)
    members = []
    for client in range(CLIENTS):
        x, y = example_data((6,), client)
        members.append(Member(None, x, y, batches(client, len(x)), None))
    model = mlp()
    cohort = PlainCohort(model, cross_entropy, members)
    train(cohort, steps=4)
    for client, values in enumerate(cohort.values):
        torch.manual_seed(0)
        own = mlp()
        parameters, optimizer = list(own.parameters()), make_optimizer(ADAM)
        x, y = example_data((6,), client)
        lots = batches(client, len(x))
        for _ in range(4):
            lot = next(lots)
            found = torch.autograd.grad(cross_entropy(own(x[lot]), y[lot]).mean(), parameters)
            optimizer.step(parameters, found)
        expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
        assert torch.equal(values[: cohort.size], expected)


@pytest.mark.parametrize("name", ["mlp", "cnn", "wide"])
def test_no_client_sees_another(name: str) -> None:
    """A change of one client's data, NaN included, changes no bit of the others' releases."""
    make, shape = MODELS[name]
    releases = []
    for poison in (0.0, 1e6, 1e30, float("nan")):
        members = [member(client, shape) for client in range(CLIENTS)]
        members[2].features[:] += poison
        releases.append(together(make, members, steps=1))
        assert torch.isfinite(releases[-1]).all()
    others = [client for client in range(CLIENTS) if client != 2]
    for changed in releases[1:]:
        assert torch.equal(changed[others], releases[0][others])
        assert not torch.equal(changed[2], releases[0][2])


def test_company_changes_nothing() -> None:
    """The same client beside nobody, beside others, and at another place among them."""
    everybody = together(mlp, [member(client, (6,)) for client in range(CLIENTS)])
    single = together(mlp, [member(3, (6,))])
    turned = together(mlp, [member(client, (6,)) for client in reversed(range(CLIENTS))])
    assert torch.equal(single[0], everybody[3])
    assert torch.equal(turned.flip(0), everybody)


@pytest.mark.parametrize("kind", [Apart, Together])
def test_the_layout_has_every_row_once(kind: type[Ragged]) -> None:
    lengths = [0, 0, 3, 3, 3, 16, 17, 17]
    layout = kind(lengths)
    found = dict(layout.each())
    assert {k: rows.stop - rows.start for k, rows in found.items()} == {
        k: length for k, length in enumerate(lengths) if length
    }
    assert all(rows.start % 16 == 0 for rows in found.values())
    assert layout.real.sum() == sum(lengths)
    assert layout.clients == tuple(found)
    assert [len(own) for own in layout.own_rows(torch.empty(2 * layout.rows, 1))] == [
        2 * length for length in lengths if length
    ]
    if isinstance(layout, Together):
        assert [run.clients for run in layout.runs] == [slice(2, 5), slice(5, 6), slice(6, 8)]
    for client, rows in found.items():
        assert layout.real[rows].all()
        assert (layout.owners[rows] == client).all()


def test_empty_lots_release_noise() -> None:
    members = []
    for client in range(2):
        step = DpSgdMechanism(PoissonSampling(0.0), FlatClipping(1.0), 1.0, 5.0)
        x, y = example_data((6,), client)
        members.append(Member(step, x, y, *streams_of(client)))
    cohort = PrivateCohort(mlp(), cross_entropy, members)
    ((_, into),) = cohort.gradients()
    assert (into[:, : cohort.size] != 0).all()
    assert (into[:, cohort.size :] == 0).all()
    assert not torch.equal(into[0], into[1])


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


@pytest.mark.parametrize(("model", "message"), [(Twice, "used twice"), (Bare, "how w is used")])
def test_what_has_no_rule_is_refused(model: type[nn.Module], message: str) -> None:
    cohort = PrivateCohort(model(), cross_entropy, [member(3, (6,))])
    with pytest.raises(UncoveredParameterError, match=message):
        list(cohort.gradients())


def test_without_privacy_only_linear_layers_have_a_rule() -> None:
    x, y = example_data((2, 6, 6), 1)
    cohort = PlainCohort(cnn(), cross_entropy, [Member(None, x, y, batches(1, len(x)), None)])
    with pytest.raises(UncoveredParameterError, match="linear layers only"):
        list(cohort.gradients())


def test_members_must_go_together() -> None:
    with pytest.raises(ValueError, match="at least one client, got 0"):
        PrivateCohort(mlp(), cross_entropy, [])
    with pytest.raises(ValueError, match="must clip alike"):
        PrivateCohort(
            mlp(), cross_entropy, [member(0, (6,)), member(1, (6,), clipping="automatic")]
        )
    x, y = example_data((6,), 1)
    with pytest.raises(ValueError, match="needs a mechanism and noise"):
        PrivateCohort(mlp(), cross_entropy, [Member(None, x, y, batches(1, len(x)), None)])
