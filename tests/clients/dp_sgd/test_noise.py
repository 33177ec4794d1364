"""Noise is normal, independent, and reproducible exactly where it claims to be."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from torch import Tensor

from fedsim.clients.dp_sgd import noise as noise_module
from fedsim.clients.dp_sgd.keystream import Keystream
from fedsim.clients.dp_sgd.noise import (
    NoiseSource,
    SecureNoise,
    SeededNoise,
    fill_rows_,
    secret_stream,
)
from fedsim.clients.training.streams import StreamKey
from fedsim.core.streams import KEY_BYTES, Purpose, stream_key

SIZE = 400_000


def seeded(seed: int) -> SeededNoise:
    return SeededNoise(stream_key(seed, Purpose.NOISE))


def drawn(source: NoiseSource, size: int = SIZE, dtype: torch.dtype = torch.float32) -> Tensor:
    return source.fill_(torch.empty(size, dtype=dtype), 1.0)


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation in units of its standard error: beyond 4 with a probability of 6e-5."""
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1]) * np.sqrt(len(a))


def sources() -> list[NoiseSource]:
    return [seeded(1), SecureNoise()]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_normal(index: int, dtype: torch.dtype) -> None:
    # The secure half is new in every run: limits are for false-alarm rates below 1e-7 there.
    values = drawn(sources()[index], dtype=dtype).double()
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-8
    assert abs(values.mean().item()) < 5.5 / np.sqrt(SIZE)
    assert abs(values.std().item() - 1) < 5.5 / np.sqrt(2 * SIZE)
    assert abs((values**4).mean().item() - 3) < 5.5 * np.sqrt(96 / SIZE)
    assert abs(correlation(values[:-1], values[1:])) < 5.5
    assert abs(correlation(values[: SIZE // 2], values[SIZE // 2 :])) < 5.5


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1), (7, 5)])
def test_noise_fills_any_shape_in_place(index: int, shape: tuple[int, ...]) -> None:
    values = torch.full(shape, float("nan"))
    assert sources()[index].fill_(values, 2.0) is values
    assert torch.isfinite(values).all()
    assert len(set(values.flatten().tolist())) == values.numel()


@pytest.mark.parametrize("index", [0, 1])
def test_no_deviation_is_no_noise(index: int) -> None:
    assert (sources()[index].fill_(torch.ones(5), 0.0) == 0).all()


def test_seeded_noise_advances_without_a_deviation_and_not_without_values() -> None:
    source, other = seeded(5), seeded(5)
    source.fill_(torch.ones(4), 0.0)
    source.fill_(torch.empty(0), 1.0)
    first = drawn(other, 4)
    assert not torch.equal(first, second := drawn(source, 4))
    assert torch.equal(second, drawn(other, 4))


@pytest.mark.parametrize("index", [0, 1])
def test_noise_fills_a_slice_and_nothing_else(index: int) -> None:
    values = torch.zeros(100)
    sources()[index].fill_(values[20:50], 1.0)
    assert (values[20:50] != 0).all()
    assert (values[:20] == 0).all()
    assert (values[50:] == 0).all()


def test_seeded_noise_is_box_muller_of_a_keystream() -> None:
    """AES-128 in counter mode by its definition, and the formula of Box and Muller in float64."""
    key = stream_key(3, Purpose.NOISE)
    block = Cipher(algorithms.AES128(key[:16]), modes.ECB()).encryptor()
    counters = b"".join(i.to_bytes(16, "big") for i in range(2, 52))
    words = np.frombuffer(block.update(counters), dtype="<u4")
    first, second = words[:100], words[100:].view(np.int32)
    radius = np.sqrt(-2 * np.log((first + 0.5) * 2.0**-32))
    angle = second * (2 * np.pi * 2.0**-32)
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    ours = SeededNoise(key).fill_(torch.empty(200), 3.0)
    np.testing.assert_allclose(ours.numpy(), 3.0 * expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("deviation", [1e-30, 0.1, 3.7, 1e30])
def test_the_deviation_scales_the_same_normals(deviation: float, dtype: torch.dtype) -> None:
    """The square of 1e-30 or 1e30 is no float32; the noise has the law of unit scale."""
    unit, scaled = drawn(seeded(3), 1001, dtype), torch.empty(1001, dtype=dtype)
    assert torch.equal(seeded(3).fill_(scaled, deviation), unit * deviation)
    rows = torch.empty(1, 1001, dtype=dtype)
    fill_rows_([seeded(3)], rows, [deviation])
    assert torch.equal(rows[0], scaled)
    secure = SecureNoise().fill_(torch.empty(SIZE, dtype=dtype), deviation).double() / deviation
    assert abs(secure.std().item() - 1) < 5.5 / np.sqrt(2 * SIZE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_on_a_gpu_is_normal_and_of_the_key(dtype: torch.dtype) -> None:
    """Limits as in `test_noise_is_normal`; the source is filled without the CPU."""
    empty = torch.empty(SIZE, dtype=dtype, device="cuda")
    before = torch.cuda.get_rng_state()
    source = seeded(5)
    values = source.fill_(empty.clone(), 2.0)
    found = values.double().cpu() / 2.0
    assert stats.kstest(found.numpy(), "norm").pvalue > 1e-8
    assert abs(found.mean().item()) < 5.5 / np.sqrt(SIZE)
    assert abs(found.std().item() - 1) < 5.5 / np.sqrt(2 * SIZE)
    assert torch.equal(values, seeded(5).fill_(empty.clone(), 2.0))
    for other in (source, seeded(6), SecureNoise()):
        following = other.fill_(empty.clone(), 1.0).double().cpu()
        assert abs(correlation(found, following)) < 5.5
    rows = torch.empty(3, 1000, dtype=dtype, device="cuda")
    fill_rows_([seeded(k) for k in range(3)], rows, [0.5, 0.0, 2.0])
    assert torch.equal(rows[0], seeded(0).fill_(torch.empty_like(rows[0]), 0.5))
    assert (rows[1] == 0).all()
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


class Constant(Keystream):
    """The end of all keystreams."""

    def __init__(self, byte: bytes) -> None:
        super().__init__(bytes(16))
        self.byte = byte

    def write(self, into: memoryview) -> None:
        into[:] = self.byte * len(into)


def test_seeded_noise_is_finite_at_the_ends_of_its_uniforms() -> None:
    source = seeded(1)
    source.keystream = Constant(b"\x00")
    assert drawn(source, 2)[0].item() == pytest.approx(np.sqrt(66 * np.log(2)))
    source.keystream = Constant(b"\xff")
    assert drawn(source, 2).tolist() == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("size", [0, 1, 33, 2407, 70_001, 300_000])
def test_noise_of_many_rows_is_that_of_each_row(size: int) -> None:
    deviations = [0.5, 0.0, 3.0, 1.7]
    rows, padded = torch.empty(4, size), torch.zeros(4, size + 7)
    fill_rows_([seeded(k) for k in range(4)], rows, deviations)
    fill_rows_([seeded(k) for k in range(4)], padded[:, :size], deviations)
    for k, deviation in enumerate(deviations):
        alone = seeded(k).fill_(torch.empty(size), deviation)
        assert torch.equal(rows[k], alone)
        assert torch.equal(padded[k, :size], alone)
    assert (padded[:, size:] == 0).all()


def test_rows_of_secure_noise_differ() -> None:
    rows = torch.empty(2, 50)
    fill_rows_([SecureNoise(), SecureNoise()], rows, [1.0, 1.0])
    assert len(set(rows.flatten().tolist())) == 100


def test_seeded_noise_depends_on_its_stream_alone() -> None:
    torch.manual_seed(1)
    first = drawn(seeded(5), 1000)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(seeded(5), 1000))
    assert not torch.equal(first, drawn(seeded(6), 1000))


def test_seeded_noise_in_parts_is_not_repeated() -> None:
    source = seeded(5)
    assert not torch.equal(drawn(source, 1000), drawn(source, 1000))


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

    def noise(self, *, secure: bool = False) -> NoiseSource:
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
    theirs = np.frombuffer(os.read(read, 40), dtype=np.float32)
    os.close(read)
    os.close(write)
    assert not np.array_equal(theirs, drawn(source, 10).numpy())


def test_secure_noise_in_chunks_is_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_CHUNK_VALUES", 1000)
    values = drawn(SecureNoise(), 100_001, torch.float64)
    assert len(set(values.tolist())) == 100_001
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-8


def test_secure_noise_reaches_where_24_bits_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest uniform gives 8.57 standard deviations, the largest 0; nothing is infinite."""

    source = SecureNoise()
    drawn(source, 1)
    monkeypatch.setattr(source, "_keystream", Constant(b"\x00"))
    assert drawn(source, 2, torch.float64)[0] == pytest.approx(np.sqrt(106 * np.log(2)))
    monkeypatch.setattr(source, "_keystream", Constant(b"\xff"))
    assert drawn(source, 2, torch.float64).tolist() == pytest.approx([0.0, 0.0])
