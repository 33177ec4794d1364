"""Views are functions of one example and of its own stream; their gradients are averaged."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.gradients.example_randomness import (
    Change,
    Flip,
    Noise,
    Shift,
    ViewError,
    Views,
    check_views,
)
from fedsim.clients.gradients.padded_batches import BatchReader
from fedsim.clients.gradients.per_example import (
    ClipBounds,
    OneAtATime,
    PaddedBatch,
    PerExampleGradients,
)
from fedsim.clients.local_settings import ViewSettings
from fedsim.core.streams import Purpose, restart_at, stream
from fedsim.models.losses import cross_entropy

AUGMENT = (ViewSettings(shift=1), ViewSettings(flip=True), ViewSettings(noise=0.1))
IMAGES = torch.randn(9, 2, 6, 6, generator=torch.Generator().manual_seed(0))
ALL = np.arange(9)


def views(number: int = 3, *, client: int = 0, round_number: int = 1) -> Views:
    return Views(
        number, AUGMENT, stream(5, Purpose.VIEWS, client=client, round_number=round_number)
    )


def test_views_depend_on_the_example_and_its_number_alone() -> None:
    together = views().draw(IMAGES, ALL, 4).unflatten(0, (9, 3))
    batch = np.array([7, 2])
    found = views().draw(IMAGES[batch], batch, 4).unflatten(0, (2, 3))
    assert torch.equal(found, together[batch])
    again = views()
    again.draw(IMAGES, ALL, 3)
    assert torch.equal(again.draw(IMAGES[batch], batch, 4), found.flatten(0, 1)), (
        "an order of steps"
    )


def test_views_differ_by_view_example_step_round_and_client() -> None:
    same = IMAGES[:1].expand(9, -1, -1, -1)
    drawn = [
        views().draw(same, ALL, 0),
        views().draw(same, ALL, 1),
        views(round_number=2).draw(same, ALL, 0),
        views(client=1).draw(same, ALL, 0),
    ]
    rows = torch.cat(drawn).flatten(1)
    assert len({row.numpy().tobytes() for row in rows}) == 4 * 9 * 3


def test_parts_of_a_stream_do_not_overlap_and_have_an_order_of_their_own() -> None:
    generator = stream(1, Purpose.VIEWS)
    parts = {}
    for step, item in [(0, 0), (0, 1), (1, 0), (2**40, 2**33)]:
        restart_at(generator, step, item)
        parts[step, item] = generator.integers(2**63, size=50)
    assert len(np.unique(np.concatenate(list(parts.values())))) == 200
    restart_at(generator, 0, 1)
    generator.random(3, dtype=np.float32)  # leaves half a word behind
    restart_at(generator, 1, 0)
    assert np.array_equal(generator.integers(2**63, size=50), parts[1, 0])


def test_changes_are_those_that_their_names_say() -> None:
    x = torch.arange(12.0).reshape(1, 3, 4) + 1
    moved = Shift(2).apply(x, torch.tensor([[1, -2]]))
    assert moved[0].tolist() == [[0, 0, 0, 0], [3, 4, 0, 0], [7, 8, 0, 0]]
    both = Flip().apply(x.expand(2, -1, -1), torch.tensor([True, False]))
    assert torch.equal(both, torch.stack([x[0].flip(-1), x[0]]))
    noise = Noise(0.5).draw(stream(0, Purpose.VIEWS), 50_000, (4,))
    assert noise.std() == pytest.approx(0.5, rel=0.02)  # false alarms below 1e-15
    assert abs(noise.mean()) < 0.01
    shifts = Shift(1).draw(stream(0, Purpose.VIEWS), 9000, (3, 4))
    pairs, counts = np.unique(shifts, axis=0, return_counts=True)
    assert pairs.tolist() == [[a, b] for a in (-1, 0, 1) for b in (-1, 0, 1)]
    assert abs(counts - 1000).max() < 240  # 8 standard deviations


@pytest.mark.parametrize("change", [Shift(2), Flip(), Noise(0.3)])
def test_a_view_has_the_same_bits_wherever_it_lies(change: Change) -> None:
    drawn = change.draw(stream(3, Purpose.VIEWS), 9, IMAGES.shape[1:])
    numbers = torch.from_numpy(np.array(drawn))
    together = change.apply(IMAGES, numbers)
    for i in range(9):
        assert torch.equal(change.apply(IMAGES[i : i + 1], numbers[i : i + 1])[0], together[i])
    order = torch.arange(9).flip(0)
    assert torch.equal(change.apply(IMAGES[order], numbers[order]), together[order])
    spoiled = IMAGES.clone()
    spoiled[1:] = torch.nan
    assert torch.equal(change.apply(spoiled, numbers)[0], together[0])


@pytest.mark.parametrize(
    ("augmentations", "shape", "message"),
    [
        ({"shift": 1}, (64,), r"shift takes images .* an example has shape \(64,\)"),
        ({"flip": True}, (64,), "flip takes images"),
        ({"shift": 6}, (2, 6, 6), "can move an image of 6 x 6 pixels out of its frame"),
    ],
)
def test_views_that_examples_do_not_have_are_refused(
    augmentations: dict[str, int], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ViewError, match=message):
        check_views([ViewSettings.model_validate(augmentations)], shape)
    check_views(AUGMENT, (6, 6))


class Sequence(nn.Module):
    """A recurrent model of the rows of an image, and a part that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)
        self.place = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cell(x.flatten(1, 2) + self.place)
        return self.head(hidden[:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.Tanh(), nn.Linear(8, 3)),
    "cnn": lambda: nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    ),
    "sequence": Sequence,
}


def made(name: str) -> PerExampleGradients:
    torch.manual_seed(0)
    targets = torch.arange(9) % 3
    return gradients_for(MODELS[name](), cross_entropy, IMAGES, targets)


def clipped(gradients: PerExampleGradients, padded: PaddedBatch, bound: float) -> Tensor:
    """The sum of the clipped gradients of a padded batch (K, size)."""
    data = gradients.parameters.data
    n = len(padded.example_weights)
    clipping = FlatClipping(bound)
    groups = clipping.groups(gradients.parameters)
    scales = torch.ones(n, 1, dtype=torch.float64)
    clip = ClipBounds(
        clipping, groups.members, scales.new_tensor([groups.bounds]).expand(n, -1), scales
    )
    into = torch.zeros(padded.clients, len(data), dtype=torch.float64)
    rows = gradients.clipped(data.expand(padded.clients, -1), padded, clip)
    rows.add_to(gradients.parameters.stacked_views(into))
    return into


@pytest.mark.parametrize(
    ("name", "clients"),
    [("mlp", 1), ("mlp", 2), ("cnn", 1), ("cnn", 2), ("sequence", 1), ("sequence", 2), ("loop", 1)],
)
def test_what_is_clipped_is_the_mean_over_the_views(name: str, clients: int) -> None:
    gradients = made("mlp" if name == "loop" else name)
    if name == "loop":
        gradients = OneAtATime(gradients.model, cross_entropy, parameters=gradients.parameters)
    x, y = torch.randn(4 * 3, 2, 6, 6), (torch.arange(4) % 3).repeat_interleave(3)
    padded = PaddedBatch(clients, x, y, torch.ones(12), views=3)
    rows = OneAtATime(gradients.model, cross_entropy, parameters=gradients.parameters)
    mean = rows.gradients(x, y).double().unflatten(0, (4, 3)).mean(1)
    norms = mean.norm(dim=1, keepdim=True)
    bound = norms.median().item()  # some are clipped, some are not
    each = mean * (bound / norms).clamp(max=1.0)
    expected = each.unflatten(0, (clients, -1)).sum(1)
    torch.testing.assert_close(clipped(gradients, padded, bound), expected, rtol=1e-4, atol=2e-5)
    wrong = rows.gradients(x, y).double()
    wrong = wrong * (bound / wrong.norm(dim=1, keepdim=True)).clamp(max=1.0)
    wrong = wrong.unflatten(0, (4, 3)).mean(1).unflatten(0, (clients, -1)).sum(1)
    assert (wrong - expected).norm() > 0.01 * expected.norm(), "clipping each view would pass too"


def test_a_tile_holds_the_views_of_an_example_side_by_side() -> None:
    y = torch.arange(9) % 3
    data = [(IMAGES, y), None, (IMAGES.flip(0), y)]
    each = [views(), None, views(client=2)]
    reader = BatchReader(data, 4, dtype=torch.float32, views=each)
    batches = [np.array([1, 5, 3, 0, 8]), None, np.array([2])]
    first, second = [
        PaddedBatch(t.clients, t.features.clone(), t.targets.clone(), t.weights.clone(), t.views)
        for t in reader.padded_batches(batches, 6)
    ]
    assert (first.clients, first.views, len(first.features)) == (3, 3, 36)
    own = views().draw(IMAGES[[1, 5, 3, 0]], np.array([1, 5, 3, 0]), 6)
    assert torch.equal(first.features[:12], own)
    assert not first.features[12:24].any()
    other = views(client=2).draw(IMAGES.flip(0)[[2]], np.array([2]), 6)
    assert torch.equal(first.features[24:27], other)
    assert first.example_weights.tolist() == [1] * 4 + [0] * 4 + [1] + [0] * 3
    assert torch.equal(first.targets[:12], y[[1, 5, 3, 0]].repeat_interleave(3))
    assert torch.equal(second.features[:3], views().draw(IMAGES[[8]], np.array([8]), 6))
    assert second.example_weights.sum() == 1


def test_a_bound_of_the_whole_gradient_holds_for_any_views() -> None:
    gradients = made("mlp")
    clipping = FlatClipping(0.5)
    groups = clipping.groups(gradients.parameters)
    for size in (1e-3, 1.0, 1e6):
        x = size * torch.randn(8 * 5, 2, 6, 6)
        padded = PaddedBatch(1, x, torch.zeros(40, dtype=torch.int64), torch.ones(40), views=5)
        for i in range(8):
            scales = torch.zeros(8, 1, dtype=torch.float64)
            scales[i] = 1.0
            into = torch.zeros(1, gradients.parameters.size, dtype=torch.float64)
            clip = ClipBounds(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)
            rows = gradients.clipped(gradients.parameters.data.unsqueeze(0), padded, clip)
            rows.add_to(gradients.parameters.stacked_views(into))
            assert into.norm() <= 0.5
