"""A block: each member's result is its own, whoever else is present, and private as alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    LayerClipping,
)
from fedsim.clients.gradients.choice import gradients_for, training_gradients
from fedsim.clients.gradients.per_example import (
    BatchStatistics,
    OneAtATime,
    PerExampleGradients,
    PerExampleLoss,
)
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.local_settings import (
    AdamSettings,
    LocalSettings,
    OptimizerSettings,
    SgdSettings,
)
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.divided_batches import BallsAndBins, ShuffledEpochs
from fedsim.clients.sampling.sampling import FixedSizeSampling, PoissonSampling, Sampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import (
    BlockMember,
    BlockResult,
    StepCallback,
    StreamKey,
    member_rows,
)
from fedsim.clients.training.plain import shuffled_batches
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose
from fedsim.models.losses import cross_entropy

CLIENTS = 6
OPTIMIZERS: dict[str, OptimizerSettings] = {
    "sgd": SgdSettings(name="sgd", lr=0.3),
    "momentum": SgdSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": AdamSettings(name="adam", lr=0.05, weight_decay=0.01),
    "adamw": AdamSettings(name="adamw", lr=0.05, weight_decay=0.01),
}
LOCAL = LocalSettings(steps=4, batch_size=6, optimizer=OPTIMIZERS["adam"])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 16, 3, padding=1, stride=2), nn.GroupNorm(2, 16), nn.Tanh()),
        *(nn.Conv2d(16, 16, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
    )


class Tokens(nn.Module):
    """A root parameter, so that a part of it runs through torch.func; a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(7, 16), nn.Parameter(torch.randn(5, 16))
        self.norm, self.mix, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.mix.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.table(x) + self.place)
        return self.head(torch.tanh(self.mix(hidden)).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (64,)),
    "cnn": (cnn, (2, 10, 10)),
    "tokens": (Tokens, (5,)),
}


def example_data(shape: tuple[int, ...], client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    n = 14 + 5 * client
    targets = torch.randint(0, 3, (n,), generator=generator)
    if shape == (5,):
        return torch.randint(0, 7, (n, *shape), generator=generator), targets
    return torch.randn(n, *shape, generator=generator), targets


def clipping_of(kind: str, bound: float) -> Clipping:
    kinds: dict[str, Callable[[], Clipping]] = {
        "flat": lambda: FlatClipping(bound),
        "layers": lambda: LayerClipping(bound, bounds="by_dimension"),
        "automatic": lambda: AutomaticClipping(bound),
        "adaptive": lambda: AdaptiveClipping.flat(bound, count_noise=2.0 + bound),
    }
    return kinds[kind]()


def member(
    client: int,
    *,
    shape: tuple[int, ...] = (64,),
    clipping: str = "flat",
    private: bool = True,
    steps: int | None = None,
    z: float = 1.0,
) -> BlockMember:
    """A client with a bound, batches, noise and a number of steps of its own."""
    x, y = example_data(shape, client)
    step = None
    if private:
        rule = clipping_of(clipping, 0.3 + 0.4 * client)
        rate = (0.3, 1.0, 0.0, 0.5, 0.2, 0.8)[client % 6]
        allocation = "proportional" if clipping == "layers" else "uniform"
        step = DpSgdMechanism(PoissonSampling(rate), rule, z, 3.0 + client, allocation)
    count = (4, 1, 3, 4, 2, 6)[client % 6] if steps is None else steps
    return BlockMember(x, y, StreamKey(7, client, 2), range(3, 3 + count), step)


@dataclass
class Bench:
    """One process's model and gradients."""

    shared: SharedModel
    gradients: PerExampleGradients | None
    loss: PerExampleLoss

    def train(
        self,
        members: Sequence[BlockMember | None],
        *,
        local: LocalSettings = LOCAL,
        rows: int | None = None,
        on_step: StepCallback | None = None,
    ) -> BlockResult:
        block = block_of(self.shared, self.loss, self.gradients, local, members, rows=rows)
        return block.train(on_step)


def bench(
    name: str = "mlp",
    *,
    private: bool = True,
    loss: PerExampleLoss = cross_entropy,
    dtype: torch.dtype = torch.float32,
) -> Bench:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().to(dtype)
    x, y = example_data(shape, 99)
    x = x.to(dtype) if x.is_floating_point() else x
    gradients = training_gradients(model, loss, x[:4], y[:4], private=private)
    parameters = None if gradients is None else gradients.parameters
    return Bench(SharedModel(model, parameters=parameters), gradients, loss)


def planned_rows(members: Sequence[BlockMember]) -> int:
    return max(member_rows(each, LOCAL) for each in members)


# --- The same bits, whoever else is present -------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_member_has_the_same_bits_whoever_else_is_present(name: str, private: bool) -> None:
    """Members differ in steps: some end early, one goes on after all others."""
    if name == "tokens" and not private:
        pytest.skip("a model with a unit trains without privacy by torch, one client at a time")
    shape = MODELS[name][1]
    members = [member(k, shape=shape, private=private) for k in range(CLIENTS)]
    place, rows = bench(name, private=private), planned_rows(members)
    everybody = place.train(members, rows=rows).values.clone()
    assert torch.isfinite(everybody).all()
    for present in ([5], [0, 2, 3, 4]):
        some = [one if k in present else None for k, one in enumerate(members)]
        found = place.train(some, rows=rows).values
        for k in present:
            assert torch.equal(found[k], everybody[k]), (present, k)


def test_no_member_sees_another() -> None:
    """A change of one client's data, NaN included, changes no bit of the others."""
    place, results = bench(), []
    members = [member(k) for k in range(CLIENTS)]
    for poison in (0.0, 1e6, 1e30, float("nan")):
        own = list(members)
        own[3] = replace(members[3], features=members[3].features + poison)
        results.append(place.train(own).values.clone())
        assert torch.isfinite(results[-1]).all()
    others = [k for k in range(CLIENTS) if k != 3]
    for changed in results[1:]:
        assert torch.equal(changed[others], results[0][others])
        assert not torch.equal(changed[3], results[0][3])


def test_members_whose_steps_have_ended_stay_where_they_are() -> None:
    """With momentum, a step of zero gradient would move them."""
    local = LocalSettings(steps=4, batch_size=6, optimizer=OPTIMIZERS["momentum"])
    members = [member(k, steps=count) for k, count in enumerate((2, 5, 0, 3))]
    place, rows = bench(), planned_rows(members)
    seen: list[Tensor] = []
    found = place.train(members, local=local, rows=rows).values.clone()
    for k, one in enumerate(members):
        stop = len(one.steps)
        short = [replace(each, steps=each.steps[:stop]) for each in members]
        again = place.train(short, local=local, rows=rows).values
        assert torch.equal(again[k], found[k])
        seen.append(again[k])
    assert torch.equal(found[2], place.shared.start_values), "no step, no change"
    assert not torch.equal(seen[0], place.shared.start_values)


# --- A block and each client alone ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clipping"),
    [("mlp", "flat"), ("cnn", "layers"), ("tokens", "automatic"), ("mlp", "adaptive")],
)
def test_a_block_agrees_with_each_client_alone_within_rounding(name: str, clipping: str) -> None:
    members = [member(k, shape=MODELS[name][1], clipping=clipping) for k in range(4)]
    place = bench(name)
    together = place.train(members)
    values = together.values.clone()
    local_sgd = LocalSettings(steps=4, batch_size=6, optimizer=OPTIMIZERS["sgd"])
    by_sgd = place.train(members, local=local_sgd).values.clone()
    for k, one in list(enumerate(members))[1::2]:
        alone = place.train([one])
        # Adam divides by the size of a gradient: where that is small, a last bit grows.
        assert (values[k] - alone.values[0]).abs().max() <= 2e-3
        assert alone.adapted_clip_norm == (together.adapted_clip_norm[k],)
        alone = place.train([one], local=local_sgd)
        torch.testing.assert_close(by_sgd[k], alone.values[0], rtol=1e-5, atol=5e-6)
        assert torch.equal(place.shared.parameters.data, alone.values[0]), "the model is trained"


def test_the_count_of_adaptive_clipping_is_each_clients_own() -> None:
    """Gradients of one client are all within its bound, of another none: bounds go apart."""
    members = [
        replace(
            member(k, clipping="adaptive", steps=6),
            release=DpSgdMechanism(
                PoissonSampling(1.0), AdaptiveClipping.flat(bound, count_noise=1e-5), 0.0, 20.0
            ),
        )
        for k, bound in enumerate((1e6, 1e-6, 1e6))
    ]
    found = bench().train([*members, None]).adapted_clip_norm
    for k, sign in enumerate((-1, 1, -1)):
        n, start = 14 + 5 * k, (1e6, 1e-6, 1e6)[k]
        within = n if sign < 0 else 0
        share = (within - n / 2) / 20.0 + 0.5
        expected = start * np.exp(-0.2 * (share - 0.5) * 6)
        assert found[k] == pytest.approx(expected, rel=1e-6)
    assert found[3] is None


def test_fixed_bounds_are_not_adapted() -> None:
    assert bench().train([member(0), None, member(3)]).adapted_clip_norm == (None, None, None)


def test_a_release_is_noise_and_clipped_gradients_over_the_expected_batch() -> None:
    """Step by step as the paper has it, from gradients of one example at a time."""
    local = LocalSettings(steps=5, batch_size=6, optimizer=SgdSettings(name="sgd", lr=0.3))
    for clipping in ("flat", "layers", "adaptive"):
        place, one = bench(), member(3, clipping=clipping, steps=5)
        values = place.train([one], local=local).values[0].clone()
        assert place.gradients is not None
        assert one.mechanism is not None
        place.shared.restart()
        step, parameters = one.mechanism, place.shared.parameters
        exact = OneAtATime(place.shared.model, place.loss, parameters=parameters)
        batches = one.key.draw_batches(step.sampling, len(one.features), first_step=3)
        noise = one.key.noise()
        for batch in islice(batches, 5):
            into = torch.zeros_like(values, dtype=torch.float64)
            groups, within = step.groups(parameters), []
            rows = exact.gradients(one.features[batch], one.targets[batch])
            for members, bound in zip(groups.members, groups.bounds, strict=True):
                places = parameters.slices(members)
                own = torch.cat([rows[:, at] for at in places], 1)
                norms = torch.linalg.vector_norm(own, dim=1, keepdim=True)
                within.append(int(torch.count_nonzero(norms <= bound)))
                for at in places:
                    part = rows[:, at] * (bound / norms).clamp(max=1)
                    into[at] += part.sum(0) / step.expected_batch
            drawn = noise.fill_(torch.empty_like(into))
            for at, group in parameters.group_slices(groups.members):
                into[at] += drawn[at] * step.grid_steps(groups)[group] / step.expected_batch
            parameters.data.add_(into, alpha=-0.3)
            step = step.adapt(BatchStatistics(len(batch), 0, tuple(within)), noise)
        torch.testing.assert_close(parameters.data, values, rtol=1e-4, atol=3e-6)


# --- Streams --------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What `on_step` sees, copied."""

    batches: list[list[list[int] | None]]
    releases: list[Tensor]
    mechanisms: list[tuple[DpSgdMechanism | None, ...]]

    def __call__(
        self,
        batches: Sequence[np.ndarray | None],
        released: Tensor,
        mechanisms: Sequence[DpSgdMechanism | None],
    ) -> None:
        self.batches.append([None if batch is None else batch.tolist() for batch in batches])
        self.releases.append(released.clone())
        self.mechanisms.append(tuple(mechanisms))


def watched() -> Watched:
    return Watched([], [], [])


def test_batches_and_noise_are_each_clients_own_streams() -> None:
    """Without examples a release is noise: that of the client's key, over its public batch."""
    nobody = PoissonSampling(0.0)
    empty = [
        replace(one, release=replace(one.mechanism, sampling=nobody))  # type: ignore[type-var]
        for one in (member(k, steps=3) for k in range(3))
    ]
    seen = watched()
    bench().train([empty[0], None, *empty[1:]], on_step=seen)
    for place, one in ((0, empty[0]), (2, empty[1]), (3, empty[2])):
        noise, step = one.key.noise(), one.mechanism
        assert step is not None
        for released in seen.releases:
            drawn = noise.fill_(torch.empty_like(released[place], dtype=torch.float64))
            sigma = step.noise_multiplier * step.clipping.max_grad_norm / step.expected_batch  # type: ignore[attr-defined]
            expected = (drawn * sigma * 2**-24).float()
            torch.testing.assert_close(released[place], expected, rtol=1e-6, atol=0)
    assert all(not released[1].any() for released in seen.releases), "nobody, nothing"


def test_on_step_sees_batches_releases_and_mechanisms() -> None:
    divided = replace(member(5).mechanism, sampling=ShuffledEpochs(4))  # type: ignore[type-var]
    members = [member(0), None, member(3, steps=2), replace(member(5), release=divided)]
    place, seen = bench(), watched()
    local = LocalSettings(steps=4, batch_size=6, optimizer=SgdSettings(name="sgd", lr=0.3))
    result = place.train(members, local=local, on_step=seen)
    assert len(seen.batches) == 6
    for k, one in enumerate(members):
        if one is None:
            assert all(batches[k] is None for batches in seen.batches)
            assert all(used[k] is None for used in seen.mechanisms)
            continue
        assert one.mechanism is not None
        count = len(one.steps)
        batches = one.key.draw_batches(one.mechanism.sampling, len(one.features), first_step=3)
        expected = [batch.tolist() for batch in islice(batches, count)]
        assert [batches[k] for batches in seen.batches] == expected + [None] * (6 - count)
        assert all(used[k] is one.mechanism for used in seen.mechanisms)
        moved = sum((released[k] for released in seen.releases), torch.zeros(()))
        start = place.shared.start_values
        torch.testing.assert_close(result.values[k], start - 0.3 * moved, rtol=1e-4, atol=1e-6)


def test_secure_members_repeat_neither_batches_nor_noise() -> None:
    """Beside a seeded member, which does."""
    members = [replace(member(k, steps=3), secure=k != 1) for k in range(3)]
    never = replace(members[2].mechanism, sampling=PoissonSampling(0.0))  # type: ignore[type-var]
    members[2] = replace(members[2], release=never)
    place, runs = bench(), (watched(), watched())
    first, again = (place.train(members, on_step=seen).values.clone() for seen in runs)
    assert torch.equal(first[1], again[1])
    assert [batches[1] for batches in runs[0].batches] == [
        batches[1] for batches in runs[1].batches
    ]
    assert [batches[0] for batches in runs[0].batches] != [
        batches[0] for batches in runs[1].batches
    ]
    assert not torch.equal(first[0], again[0])
    assert not torch.equal(first[2], again[2]), "empty batches: the noise alone differs"


@pytest.mark.parametrize("name", ["mlp", "dropout"])
@pytest.mark.parametrize("private", [True, False])
def test_training_leaves_the_global_generators_alone(private: bool, name: str) -> None:
    place = bench(private=private)
    if name == "dropout":
        model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        x, y = example_data((64,), 1)
        gradients = gradients_for(model, cross_entropy, x[:4], y[:4])
        shared = SharedModel(model, parameters=gradients.parameters)
        place = Bench(shared, gradients if private else None, cross_entropy)
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002  the global generator is what must stay untouched
    expected = (torch.rand(2), np.random.rand(2))  # noqa: NPY002
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    place.train([member(0, private=private)])
    torch.testing.assert_close(torch.rand(2), expected[0])
    np.testing.assert_array_equal(np.random.rand(2), expected[1])  # noqa: NPY002


def batches_of_rounds(
    sampling: Sampling, steps: int, rounds: int, *, secure: bool = False
) -> list[list[int]]:
    """Return what one client draws from 30 examples."""
    drawn = []
    for number in range(rounds):
        key, first = StreamKey(1, 2, number + 1), steps * number
        batches = key.draw_batches(sampling, 30, first_step=first, secure=secure)
        drawn += [batch.tolist() for batch in islice(batches, steps)]
    return drawn


@pytest.mark.parametrize("sampling", [ShuffledEpochs(5), BallsAndBins(5)])
def test_epochs_go_on_over_rounds(sampling: Sampling) -> None:
    batches = batches_of_rounds(sampling, steps=2, rounds=5)
    for epoch in (batches[:5], batches[5:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(30))
    assert batches[:5] != batches[5:]


@pytest.mark.parametrize("sampling", [PoissonSampling(0.2), FixedSizeSampling(30, 6)])
def test_independent_batches_differ_between_rounds(sampling: Sampling) -> None:
    batches = batches_of_rounds(sampling, steps=3, rounds=3)
    assert len(batches) == 9
    assert len({tuple(batch) for batch in batches}) == 9


@pytest.mark.parametrize("sampling", [PoissonSampling(0.2), BallsAndBins(5).within_rounds(9)])
def test_secure_training_repeats_no_batches(sampling: Sampling) -> None:
    """False alarm of equal divisions of 30 examples into 5 bins: below 1e-20."""
    first, again = (batches_of_rounds(sampling, steps=9, rounds=1, secure=True) for _ in range(2))
    assert first != again


def test_secure_epochs_start_anew_in_each_round() -> None:
    batches = batches_of_rounds(BallsAndBins(5).within_rounds(7), steps=7, rounds=2, secure=True)
    for start in (0, 7):
        epoch, rest = batches[start : start + 5], batches[start + 5 : start + 7]
        assert sorted(i for batch in epoch for i in batch) == list(range(30))
        assert len({i for batch in rest for i in batch}) == sum(map(len, rest))


def test_the_batches_of_poisson_sampling_are_those_of_the_round_s_stream() -> None:
    """Fixes the meaning of a seed: what a run drew, it draws again in every later version."""
    batches = islice(StreamKey(1, 2, 3).draw_batches(PoissonSampling(0.2), 30, first_step=15), 3)
    assert [batch.tolist() for batch in batches] == [
        [0, 4, 5, 16, 27],
        [1, 2, 6, 8, 11, 17, 19, 26],
        [0, 2, 3, 6, 10, 21, 23],
    ]


# --- Exactness ------------------------------------------------------------------------------------


def by_torch(
    make: Callable[[], nn.Module], settings: OptimizerSettings, one: BlockMember, batch_size: int
) -> Tensor:
    """Train by torch.optim on mean losses of the same batches."""
    torch.manual_seed(0)
    model = make()
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {key: value for key, value in settings.model_dump().items() if key != "name"}
    optimizer = kinds.get(settings.name, torch.optim.SGD)(model.parameters(), **options)
    generator = one.key.generator(Purpose.SAMPLING)
    batches = shuffled_batches(len(one.features), batch_size, generator)
    for _ in one.steps:
        batch = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(one.features[batch]), one.targets[batch]).mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("name", "optimizer", "most"),
    [("mlp", "sgd", 4), ("mlp", "momentum", None), ("cnn", "adam", 4), ("cnn", "adamw", None)],
)
def test_plain_blocks_equal_torchs_own_training_within_rounding(
    name: str, optimizer: str, most: int | None
) -> None:
    """Passes end with smaller batches; members have sizes and numbers of steps of their own."""
    settings = OPTIMIZERS[optimizer]
    local = LocalSettings(steps=4, batch_size=6, optimizer=settings, max_physical_batch=most)
    make, shape = MODELS[name]
    members = [member(k, shape=shape, private=False) for k in range(4)]
    place = bench(name, private=False)
    assert isinstance(place.gradients, RuleGradients)
    values = place.train([*members, None], local=local).values
    for k, one in enumerate(members):
        expected = by_torch(make, settings, one, 6)
        tolerance = 2e-3 if optimizer.startswith("adam") else 1e-5
        assert (values[k] - expected).abs().max() <= tolerance


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_clipping_training_is_full_batch_gradient_descent(name: str) -> None:
    local = LocalSettings(steps=10, batch_size=14, optimizer=OPTIMIZERS[name])
    exact = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(1e9), 0.0, expected_batch=14.0)
    one = member(0, steps=10)
    one = replace(one, features=one.features.double(), release=exact)
    place = bench(dtype=torch.float64)
    private = place.train([one], local=local).values[0]

    def in_double() -> nn.Module:
        return mlp().double()

    expected = by_torch(in_double, OPTIMIZERS[name], one, 14)
    torch.testing.assert_close(private, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("most", "private"), [(1, True), (5, False), (11, True)])
def test_splitting_batches_changes_nothing_but_rounding(most: int, private: bool) -> None:
    """One noise draw and one step for each batch, however many padded batches it has."""
    sgd = SgdSettings(name="sgd", lr=0.3)
    local = LocalSettings(steps=4, batch_size=12, optimizer=sgd)
    split = LocalSettings(steps=4, batch_size=12, optimizer=sgd, max_physical_batch=most)
    whole = [member(k, private=private) for k in range(4)]
    parts = whole
    if private:
        parts = [replace(m, release=replace(m.mechanism, max_physical_batch=most)) for m in whole]  # type: ignore[type-var]
    place = bench(private=private)
    expected = place.train(whole, local=local).values.clone()
    for members, own in ((parts, expected), (parts[1:2], expected[1:2])):  # together and alone
        seen = watched()
        found = place.train(members, local=split, on_step=seen).values
        torch.testing.assert_close(found, own, rtol=1e-5, atol=2e-6)
        assert len(seen.releases) == max(len(each.steps) for each in members)


@pytest.mark.parametrize("loss", ["known", "by autograd"])
def test_rows_that_are_no_examples_do_not_matter_without_privacy(loss: str) -> None:
    """A block of one in padded batches of many more rows."""

    def plain(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    place = bench(private=False, loss=cross_entropy if loss == "known" else plain)
    local = LocalSettings(steps=4, batch_size=6, optimizer=SgdSettings(name="sgd", lr=0.3))
    one = member(3, private=False)
    found = place.train([one], local=local).values.clone()
    more = place.train([one, None], local=local, rows=40).values[0]
    torch.testing.assert_close(more, found[0], rtol=1e-5, atol=1e-6)


# --- Refusals -------------------------------------------------------------------------------------


def test_a_block_without_anybody_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one member that is present"):
        bench().train([None, None])
    with pytest.raises(ValueError, match="at least one member that is present"):
        bench().train([])


def test_members_that_do_not_go_together_are_refused() -> None:
    place = bench()
    for other in (member(1, clipping="automatic"), member(1, private=False)):
        with pytest.raises(ValueError, match="clip by one rule, or all train without privacy"):
            place.train([member(0), None, other])


def test_a_model_for_one_client_refuses_several_and_trains_one() -> None:
    """Dropout draws random numbers that several clients would share."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = example_data((64,), 1)
    gradients = gradients_for(model, cross_entropy, x[:4], y[:4])
    assert not gradients.stacks
    shared = SharedModel(model, parameters=gradients.parameters)
    for way in (gradients, OneAtATime(model, cross_entropy, parameters=gradients.parameters)):
        place = Bench(shared, way, cross_entropy)
        with pytest.raises(ValueError, match="one at a time, got 2 in a block"):
            place.train([member(0), None])
        first = place.train([member(0)]).values.clone()
        assert torch.equal(place.train([member(0)]).values, first), "masks of the client's stream"


def test_privacy_needs_per_example_gradients() -> None:
    place = bench()
    place.gradients = None
    with pytest.raises(ValueError, match="needs per-example gradients"):
        place.train([member(0)])
