"""Noise is normal, independent, and reproducible exactly where it claims to be.

The laws of the samplers themselves are tested in tests/fedsim/noise.
"""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedsim.clients.training.member import StreamKey
from fedsim.core.streams import KEY_BYTES, Purpose, stream_key
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise, fill_rows_, secret_stream
from fedsim.noise.spline import CHUNK_VALUES

SIZE = 400_000


def seeded(seed: int) -> SeededNoise:
    return SeededNoise(stream_key(seed, Purpose.NOISE))


def drawn(source: NoiseSource, size: int = SIZE) -> Tensor:
    """Draws in units of their standard deviation."""
    return source.fill_(empty(size)) / 2**24


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation in units of its standard error: beyond 4 with a probability of 6e-5."""
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1]) * np.sqrt(len(a))


def sources() -> list[NoiseSource]:
    return [seeded(1), SecureNoise()]


@pytest.mark.parametrize("index", [0, 1])
def test_noise_is_normal(index: int) -> None:
    # The secure half is new in every run: limits are for false-alarm rates below 1e-7 there.
    values = drawn(sources()[index])
    assert torch.equal(values * 2**24, (values * 2**24).round()), "integers"
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-8
    assert abs(values.mean().item()) < 5.5 / np.sqrt(SIZE)
    assert abs(values.std().item() - 1) < 5.5 / np.sqrt(2 * SIZE)
    assert abs((values**4).mean().item() - 3) < 5.5 * np.sqrt(96 / SIZE)
    assert abs(correlation(values[:-1], values[1:])) < 5.5
    assert abs(correlation(values[: SIZE // 2], values[SIZE // 2 :])) < 5.5


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1), (7, 5)])
def test_noise_fills_any_shape_in_place(index: int, shape: tuple[int, ...]) -> None:
    values = torch.full(shape, float("nan"), dtype=torch.float64)
    assert sources()[index].fill_(values) is values
    assert torch.isfinite(values).all()
    assert len(set(values.flatten().tolist())) == values.numel()


@pytest.mark.parametrize("index", [0, 1])
def test_integers_that_a_type_cannot_hold_are_refused(index: int) -> None:
    with pytest.raises(TypeError, match="in float64, got a tensor of"):
        sources()[index].fill_(torch.empty(3))


def test_seeded_noise_advances_with_values_only() -> None:
    source, other = seeded(5), seeded(5)
    source.fill_(empty(0))
    assert torch.equal(drawn(source, 4), first := drawn(other, 4))
    assert not torch.equal(first, second := drawn(source, 4))
    assert torch.equal(second, drawn(other, 4))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("step", [1, 2])
def test_noise_fills_a_slice_and_nothing_else(index: int, step: int) -> None:
    values = torch.zeros(100, dtype=torch.float64)
    sources()[index].fill_(values[20:50:step])
    assert (values[20:50:step] != 0).all()
    values[20:50:step] = 0
    assert not values.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_noise_on_a_gpu_is_normal_and_of_the_key() -> None:
    """Limits as in `test_noise_is_normal`; the source is filled without the CPU."""
    like = empty(SIZE).cuda()
    before = torch.cuda.get_rng_state()
    source = seeded(5)
    values = source.fill_(like.clone())
    found = values.cpu() / 2**24
    assert torch.equal(values, values.round())
    assert stats.kstest(found.numpy(), "norm").pvalue > 1e-8
    assert abs(found.mean().item()) < 5.5 / np.sqrt(SIZE)
    assert abs(found.std().item() - 1) < 5.5 / np.sqrt(2 * SIZE)
    assert torch.equal(values, seeded(5).fill_(like.clone()))
    for other in (source, seeded(6), SecureNoise()):
        following = other.fill_(like.clone()).cpu()
        assert abs(correlation(found, following)) < 5.5
    rows = empty(3, 1000).cuda()
    fill_rows_([seeded(k) for k in range(3)], rows)
    assert torch.equal(rows[0], seeded(0).fill_(torch.empty_like(rows[0])))
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("length", [0, 16, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"must have 32 bytes, got {length}"):
        SeededNoise(bytes(length))


def test_every_bit_of_the_key_counts() -> None:
    """Pairs beyond 5 standard errors: false-alarm rate 4e-6 for all."""
    base = drawn(SeededNoise(bytes(KEY_BYTES)), 2000)
    for place in (0, 7, 15):
        for bit in (1, 128):
            other = bytearray(KEY_BYTES)
            other[place] = bit
            assert abs(correlation(base, drawn(SeededNoise(bytes(other)), 2000))) < 5


@pytest.mark.parametrize("size", [0, 1, 33, 2407, CHUNK_VALUES, CHUNK_VALUES + 9])
@pytest.mark.parametrize("wrapped", [False, True])
def test_noise_of_many_rows_is_that_of_each_row(size: int, wrapped: bool) -> None:
    def given() -> list[NoiseSource]:
        found = [seeded(k) for k in range(4)]
        return [Other(found[0]), *found[1:]] if wrapped else list(found)

    rows, padded = empty(4, size), torch.zeros(4, size + 7, dtype=torch.float64)
    fill_rows_(given(), rows)
    fill_rows_(given(), padded[:, :size])
    for k in range(4):
        alone = seeded(k).fill_(empty(size))
        assert torch.equal(rows[k], alone)
        assert torch.equal(padded[k, :size], alone)
    assert (padded[:, size:] == 0).all()


class Other(NoiseSource):
    """A source of another class."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def fill_(self, values: Tensor) -> Tensor:
        return self.source.fill_(values)


def test_rows_of_secure_noise_differ() -> None:
    rows = empty(2, 50)
    fill_rows_([SecureNoise(), SecureNoise()], rows)
    assert len(set(rows.flatten().tolist())) == 100


def test_seeded_noise_depends_on_its_stream_alone() -> None:
    torch.manual_seed(1)
    first = drawn(seeded(5), 1000)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(seeded(5), 1000))
    assert not torch.equal(first, drawn(seeded(6), 1000))


def check_independent(streams: dict[str, StreamKey]) -> None:
    """No two streams are correlated: 15 pairs at 4.5 standard errors, false-alarm rate 1e-4."""
    noises = {name: drawn(key.noise(), 200_000) for name, key in streams.items()}
    names = list(noises)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert abs(correlation(noises[one], noises[other])) < 4.5, (one, other)


KEYS = {
    "base": StreamKey(1, 2, 3),
    "seed": StreamKey(2, 2, 3),
    "client": StreamKey(1, 3, 3),
    "round": StreamKey(1, 2, 4),
    "swapped": StreamKey(1, 3, 2),
    "far": StreamKey(1, 2 + 2**16, 3),
}


def test_noise_is_independent_over_seeds_clients_and_rounds() -> None:
    check_independent(KEYS)


class RoundIgnored(StreamKey):
    """`torch.manual_seed(42)` in every round, in other words."""

    def noise(self, **_: object) -> NoiseSource:
        return StreamKey(self.seed, self.client, 0).noise()


def test_mutation_a_reused_seed_is_caught() -> None:
    wrong = {"round 1": RoundIgnored(1, 2, 1), "round 2": RoundIgnored(1, 2, 2)}
    with pytest.raises(AssertionError):
        check_independent(dict(wrong))


def test_secure_noise_never_repeats() -> None:
    source = SecureNoise()
    draws = [drawn(source, 1000), drawn(source, 1000), drawn(SecureNoise(), 1000)]
    assert len({tuple(values.tolist()) for values in draws}) == 3
    assert not np.array_equal(secret_stream().random(5), secret_stream().random(5))


def test_secure_noise_takes_no_seed() -> None:
    with pytest.raises(TypeError):
        SecureNoise(42)  # type: ignore[call-arg]
    torch.manual_seed(1)
    first = drawn(StreamKey(1, 2, 3).noise(secure=True), 100)
    torch.manual_seed(1)
    assert not torch.equal(first, drawn(StreamKey(1, 2, 3).noise(secure=True), 100))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_secure_noise_cannot_be_copied(copied: object) -> None:
    with pytest.raises(TypeError, match="would repeat it"):
        copied(SecureNoise())  # type: ignore[operator]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_noise_of_its_own() -> None:
    source = SecureNoise()
    drawn(source, 10)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, drawn(source, 10).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(read, 80), dtype=np.float64)
    os.close(read)
    os.close(write)
    assert not np.array_equal(theirs, drawn(source, 10).numpy())


@pytest.mark.parametrize("index", [0, 1])
def test_noise_in_chunks_is_one_stream(index: int) -> None:
    values = drawn(sources()[index], 2 * CHUNK_VALUES + 1)
    parts = values[:CHUNK_VALUES], values[CHUNK_VALUES : 2 * CHUNK_VALUES]
    assert not torch.equal(*parts)
    assert abs(correlation(*parts)) < 5.5
    if index == 0:
        source = seeded(1)
        again = [drawn(source, n) for n in (CHUNK_VALUES, CHUNK_VALUES, 1)]
        assert torch.equal(values, torch.cat(again))


@pytest.mark.parametrize("source", [SecureNoise(), SeededNoise(bytes(range(32)))])
def test_words_and_further_bits_have_keys_of_their_own(source: SecureNoise | SeededNoise) -> None:
    """With one key, the bits that decide a draw would be those of its word."""
    words, further = bytearray(64), bytearray(64)
    for stream, drawn in zip(source.keystreams(), (words, further), strict=True):
        stream.write(memoryview(drawn))
    assert words != further
    assert len(set(words)) > 16
