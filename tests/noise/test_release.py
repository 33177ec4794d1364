"""The compiled release has the bits of the plain one, also where 19 bits decide nothing."""

import numpy as np
import pytest
import torch

from fedsim.core.streams import Purpose, stream_key
from fedsim.noise import release, spline
from fedsim.noise.release import Scales, release_
from fedsim.noise.sources import NoiseSource, SeededNoise
from fedsim.noise.spline import CHUNK_VALUES, WORD_BITS, centre_table

pytest.importorskip("numba")


def released(
    sums: torch.Tensor, into: torch.Tensor, scales: Scales, noises: list[NoiseSource | None]
) -> torch.Tensor:
    release_(sums.clone(), noises, scales, into)
    return into


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 5 * CHUNK_VALUES + 7), (3, 2 * CHUNK_VALUES + 5), (2, 5_000), (200, 999)]
)
def test_the_bits_are_those_without_numba(
    shape: tuple[int, int],
    kind: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, size = shape
    generator = torch.Generator().manual_seed(1)
    sums = torch.randn(shape, generator=generator).mul_(1e8).to(kind)
    sums[0, :6] = torch.tensor([0.5, 1.5, -2.5, 1e30, -1e30, 3e15])
    lengths = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    third = size // 3
    scales = Scales(torch.cat([lengths, 3e-9 * lengths], 1), (third, size))
    found = []
    for least in (1, 1 << 60):
        monkeypatch.setattr(release, "LEAST_VALUES", least)
        keys = [stream_key(row, Purpose.NOISE) for row in range(rows)]
        noises: list[NoiseSource | None] = [SeededNoise(key) for key in keys]
        if rows > 1:
            noises[1] = None
        twice = [torch.empty(shape, dtype=kind) for _ in range(2)]
        found += [released(sums, into, scales, noises) for into in twice]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3]), "the streams went on alike"
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("above", [True, False])
def test_words_at_a_threshold_are_decided_by_the_extension(above: bool) -> None:
    """Every column of the table, with its threshold's 19 bits: once in 2^19 draws by chance."""
    kernel, table = release.kernel(), centre_table()
    assert kernel is not None
    columns = np.arange(len(table.packed), dtype=np.uint32)
    low = table.packed.astype(np.uint32) & np.uint32((1 << WORD_BITS) - 1)
    each = columns << np.uint32(WORD_BITS) | low
    size = CHUNK_VALUES + len(columns)
    chunks = (np.resize(each, CHUNK_VALUES), each)
    words = b"".join(part.tobytes() + bytes(8 * len(part)) for part in chunks)

    class Extension:
        def write(self, into: memoryview) -> None:
            into[:] = (b"\xff" if above else b"\x00") * len(into)

    class Words:
        at = 0

        def write(self, into: memoryview) -> None:
            into[:] = words[self.at : self.at + len(into)]
            self.at += len(into)

    into, expected = torch.empty(1, size, dtype=torch.float64), np.empty((1, size))
    scales = Scales(torch.ones(1, 1, dtype=torch.float64), [size])
    release.release_rows(kernel, [(Words(), Extension())], torch.zeros_like(into), scales, into)
    spline.fill_rows([(Words(), Extension())], expected)
    assert np.array_equal(into, expected)


def test_small_releases_start_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "kernel", lambda: pytest.fail("numba was started"))
    for size in (1000, 100_000):
        sums, into = torch.zeros(4, size), torch.empty(4, size)
        release_(sums, [SeededNoise(bytes([k]) * 32) for k in range(4)], None, into)
        assert into.any(1).all()


def test_many_releases_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "kernel", lambda: pytest.fail("numba was started"))
    demand = release.Demand()
    assert demand.kernel(release.LEAST_VALUES - 1) is None
    with pytest.raises(pytest.fail.Exception, match="was started"):
        demand.kernel(1)


def test_a_keystream_is_taken_on_where_a_compiled_release_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "LEAST_VALUES", 1)
    one, other = (SeededNoise(bytes(32)) for _ in range(2))
    size = 2 * CHUNK_VALUES + 3
    scales = Scales(torch.ones(1, 1, dtype=torch.float64), [size])
    release_(torch.zeros(1, size), [one], scales, torch.empty(1, size))
    other.fill_(torch.empty(size, dtype=torch.float64))
    after = torch.empty(9, dtype=torch.float64)
    assert torch.equal(one.fill_(after.clone()), other.fill_(after))
