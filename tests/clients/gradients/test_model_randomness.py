"""Random numbers of an example in a model are its own, whoever else is in the batch."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from fedsim.clients.gradients.example_randomness import KEY_BYTES, ModelRandomness
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.training.member import StreamKey

KEYS = [bytes([k]) * KEY_BYTES for k in range(3)]
FALSE_ALARM = 1e-9
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout that is told no mode": lambda x: torch.native_dropout(x, 0.4, None)[0],
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.clone().normal_(2.0, 3.0),
    "uniform_": lambda x: x.clone().uniform_(-1.0, 1.0),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "vmap": lambda x: vmap(lambda row: functional.dropout(row, 0.4), randomness="different")(x),
}


def run(
    draw: Callable[[Tensor], Tensor], batches: list[list[int]], rows: int, *, step: int = 0
) -> dict[tuple[int, int], Tensor]:
    """Return what a function makes of ones (4, 5), by client and example."""
    randomness = ModelRandomness(KEYS[: len(batches)], b"s" * KEY_BYTES)
    randomness.begin([np.array(batch, np.int64) for batch in batches], rows=rows, step=step)
    with randomness:
        found = draw(torch.ones(len(batches) * rows, 4, 5)).view(len(batches), rows, 4, 5)
    assert randomness.has_drawn
    return {(k, i): found[k, at] for k, batch in enumerate(batches) for at, i in enumerate(batch)}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_of_an_example_do_not_depend_on_its_batch(draw: Callable[[Tensor], Tensor]) -> None:
    before = torch.get_rng_state()
    first = run(draw, [[3, 5, 8, 9]], 8)
    assert torch.equal(before, torch.get_rng_state())
    others = [run(draw, [[9, 8, 1]], 8), run(draw, [[3, 9], [3, 5]], 16)]
    for other in others:
        for place in first.keys() & other.keys():
            assert torch.equal(first[place], other[place])
    assert not torch.equal(first[0, 3], first[0, 5])
    assert not torch.equal(others[1][0, 3], others[1][1, 3]), "two clients"
    assert not torch.equal(first[0, 3], run(draw, [[3]], 8, step=1)[0, 3]), "two steps"


def test_each_call_and_each_view_has_numbers_of_its_own() -> None:
    randomness = ModelRandomness(KEYS[:1], KEYS[1])
    randomness.begin([np.array([4, 7])], rows=8, views=2)
    with randomness:
        one, two = torch.rand(16, 6), torch.rand(16, 6)
    rows = torch.cat([one[:4], two[:4]])
    assert len({tuple(row.tolist()) for row in rows}) == 8


def test_a_row_alone_has_the_numbers_that_it_has_beside_others() -> None:
    randomness = ModelRandomness(KEYS[:1], KEYS[1])
    randomness.begin([np.array([4, 7])], rows=8)
    with randomness:
        together = torch.rand(8, 6)
        randomness.only(1)
        assert torch.equal(torch.rand(1, 6), together[1:2])


def test_numbers_without_rows_are_the_same_for_every_batch_of_a_step() -> None:
    found = []
    for batch in ([1, 2, 3], [5]):
        randomness = ModelRandomness(KEYS[:1], KEYS[1])
        randomness.begin([np.array(batch)], rows=8)
        with randomness:
            found.append(torch.rand(3))
    assert torch.equal(*found)


def test_the_laws_are_those_of_torch() -> None:
    """False-alarm rate of each comparison below FALSE_ALARM; a law 5 % off is rejected."""
    randomness = ModelRandomness(KEYS[:1], KEYS[1])
    randomness.begin([np.arange(200)], rows=200)
    with randomness:
        uniform, normal = torch.rand(200, 500), torch.randn(200, 500)
        kept = functional.dropout(torch.ones(200, 500), 0.3) > 0
        gaps = torch.empty(200, 500).exponential_(2.0)
    for values, law in (
        (uniform, stats.uniform()),
        (normal, stats.norm()),
        (gaps, stats.expon(scale=0.5)),
    ):
        assert stats.kstest(values.flatten().double().numpy(), law.cdf).pvalue > FALSE_ALARM
    chance = stats.binomtest(int(kept.sum()), kept.numel(), 0.7).pvalue
    assert chance > FALSE_ALARM
    assert stats.binomtest(int(kept.sum()), kept.numel(), 0.735).pvalue < FALSE_ALARM


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda x: functional.rrelu(x, training=True), "draws random numbers by torch's rrelu"),
        (lambda x: torch.randperm(len(x)), "randperm, which fedsim cannot key by example"),
    ],
)
def test_what_cannot_be_keyed_is_refused(draw: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(UnsafeModelError, match=said):
        run(draw, [[1, 2]], 16)


def test_attention_without_dropout_draws_nothing() -> None:
    randomness, x = ModelRandomness(KEYS[:1], KEYS[1]), torch.rand(8, 2, 4, 5)
    randomness.begin([np.arange(8)], rows=8)
    expected = functional.scaled_dot_product_attention(x, x, x)
    with randomness:
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x), expected)
    assert not randomness.has_drawn


@pytest.mark.parametrize("secure", [False, True])
def test_the_key_is_secret_where_noise_is_secure(secure: bool) -> None:
    key = StreamKey(1, 2, 3)
    one, other = (key.model_randomness(secure=secure) for _ in range(2))
    assert (one == other) is not secure


def test_lstm_layers_with_dropout_draw_by_example() -> None:
    model = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True)

    def outputs(batch: list[int], rows: int) -> Tensor:
        randomness = ModelRandomness(KEYS[:1], KEYS[1])
        randomness.begin([np.array(batch)], rows=rows)
        x = torch.randn(20, 5, 4, generator=torch.Generator().manual_seed(1))
        with randomness if rows else nullcontext():
            return model(torch.cat([x[batch], x.new_zeros(rows - len(batch), 5, 4)]))[0]

    one, other = outputs([2, 5, 6], 8), outputs([6, 1], 8)
    assert torch.allclose(one[2], other[0], atol=1e-6)
