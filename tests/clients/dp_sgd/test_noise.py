"""Noise is normal, independent, and reproducible exactly where it claims to be."""

import copy
import math
import os
import pickle
import subprocess
import sys

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
from fedsim.clients.training.local_training import StreamKey

SIZE = 400_000


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(source: NoiseSource, size: int = SIZE, dtype: torch.dtype = torch.float32) -> Tensor:
    return source.fill_(torch.empty(size, dtype=dtype), 1.0)


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation in units of its standard error: beyond 4 with a probability of 6e-5."""
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1]) * np.sqrt(len(a))


def sources() -> list[NoiseSource]:
    return [SeededNoise(stream(1)), SecureNoise()]


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
    source, other = SeededNoise(stream(5)), SeededNoise(stream(5))
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


@pytest.mark.parametrize("logarithm", [(np.log2, np.log(2.0)), (np.log, 1.0)])
def test_seeded_noise_is_box_muller_of_a_keystream(
    logarithm: tuple[np.ufunc, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AES-128-CTR by its definition, and the formula of Box and Muller in float64."""
    monkeypatch.setattr(noise_module, "fast_logarithm", lambda: logarithm)
    key = stream(3).bytes(16)
    block = Cipher(algorithms.AES128(key), modes.ECB()).encryptor()
    counters = b"".join(i.to_bytes(16, "big") for i in range(50))
    words = np.frombuffer(block.update(counters), dtype="<u4")
    first, second = words[:100], words[100:].view(np.int32)
    radius = np.sqrt(-2 * np.log((first + 0.5) * 2.0**-32))
    angle = second * (2 * np.pi * 2.0**-32)
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    ours = SeededNoise(stream(3)).fill_(torch.empty(200), 3.0)
    np.testing.assert_allclose(ours.numpy(), 3.0 * expected, rtol=2e-5, atol=2e-6)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="numpy does not tell")
def test_processors_without_a_vectorised_log2_take_log() -> None:
    """As on one without AVX-512; this one's own choice is one of the two."""
    assert noise_module.fast_logarithm() in [(np.log2, math.log(2.0)), (np.log, 1.0)]
    code = "from fedsim.clients.dp_sgd import noise; print(noise.fast_logarithm()[0].__name__)"
    older = {**os.environ, "NPY_DISABLE_CPU_FEATURES": _disabled()}
    result = subprocess.run(
        [sys.executable, "-c", code], env=older, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["log"]


def _disabled() -> str:
    """Return what this numpy can leave out beyond AVX2, which is nothing on other processors."""
    from numpy.lib.introspect import opt_func_info

    ways = opt_func_info(func_name="^log2$", signature="float32")["log2"].values()
    (available,) = {way["available"] for way in ways}
    return " ".join(name for name in available.split() if not name.startswith("baseline"))


def test_the_key_is_the_streams_next_bytes() -> None:
    """Whichever generator the stream has, and wherever the stream stands."""
    for kind in (np.random.PCG64DXSM, np.random.PCG64, np.random.MT19937):
        one, other = (np.random.Generator(kind(7)) for _ in range(2))
        assert one.random() == other.random()
        expected = Keystream(other.bytes(16))
        ours, theirs = bytearray(64), bytearray(64)
        SeededNoise(one).keystream.write(memoryview(ours))
        expected.write(memoryview(theirs))
        assert ours == theirs
        assert one.random() == other.random()


def test_every_bit_of_the_key_counts() -> None:
    class Given:
        bit_generator = None  # none of those whose words are read at once

        def __init__(self, key: bytes) -> None:
            self.key = key

        def bytes(self, length: int) -> bytes:
            assert length == len(self.key)
            return self.key

    def noise(key: bytes) -> Tensor:
        return drawn(SeededNoise(Given(key)), 2000)  # type: ignore[arg-type]

    base = noise(bytes(16))
    for place in (0, 7, 15):
        for bit in (1, 128):
            other = bytearray(16)
            other[place] = bit
            assert abs(correlation(base, noise(bytes(other)))) < 5


class Constant(Keystream):
    """The end of all keystreams."""

    def __init__(self, byte: bytes) -> None:
        super().__init__(bytes(16))
        self.byte = byte

    def write(self, into: memoryview) -> None:
        into[:] = self.byte * len(into)


def test_seeded_noise_is_finite_at_the_ends_of_its_uniforms() -> None:
    source = SeededNoise(stream(1))
    source.keystream = Constant(b"\x00")
    assert drawn(source, 2)[0].item() == pytest.approx(np.sqrt(66 * np.log(2)))
    source.keystream = Constant(b"\xff")
    assert drawn(source, 2).tolist() == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("size", [1, 33, 2407, 70_001])
def test_noise_of_many_rows_is_that_of_each_row(size: int) -> None:
    deviations = [0.5, 0.0, 3.0, 1.7]
    rows, padded = torch.empty(4, size), torch.zeros(4, size + 7)
    fill_rows_([SeededNoise(stream(k)) for k in range(4)], rows, deviations)
    fill_rows_([SeededNoise(stream(k)) for k in range(4)], padded[:, :size], deviations)
    for k, deviation in enumerate(deviations):
        alone = SeededNoise(stream(k)).fill_(torch.empty(size), deviation)
        assert torch.equal(rows[k], alone)
        assert torch.equal(padded[k, :size], alone)
    assert (padded[:, size:] == 0).all()


def test_rows_of_secure_noise_differ() -> None:
    rows = torch.empty(2, 50)
    fill_rows_([SecureNoise(), SecureNoise()], rows, [1.0, 1.0])
    assert len(set(rows.flatten().tolist())) == 100


def test_seeded_noise_depends_on_its_stream_alone() -> None:
    torch.manual_seed(1)
    first = drawn(SeededNoise(stream(5)), 1000)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(SeededNoise(stream(5)), 1000))
    assert not torch.equal(first, drawn(SeededNoise(stream(6)), 1000))


def test_seeded_noise_in_parts_is_not_repeated() -> None:
    source = SeededNoise(stream(5))
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

    def noise(
        self, *, secure: bool = False, stream: np.random.Generator | None = None
    ) -> NoiseSource:
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
