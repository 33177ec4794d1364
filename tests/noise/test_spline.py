"""The spline sampler's integers are those of its definition, from the bytes on."""

import numpy as np
import pytest

from fedsim.core.streams import Keystream
from fedsim.noise import spline
from fedsim.noise.spline import BYTES, ByteStream, Memory, centre_table, fill_rows, spline_integers


class Fixed:
    """A stream of given numbers of 192 bits, which counts what was read."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def write(self, into: memoryview) -> None:
        into[:] = self.numbers.pop(0).to_bytes(len(into), "little")


def never(row: int) -> ByteStream:
    raise AssertionError(f"row {row} needs no further bits")


def stream(row: int) -> ByteStream:
    return Keystream(bytes([row]) * 32)


def row_of(picks: list[int], uniforms: list[list[int]]) -> np.ndarray:
    """Return the bytes of a row, by the definition: words, then four planes of uniforms."""
    parts = [pick.to_bytes(4, "little") for pick in picks]
    parts += [value.to_bytes(2, "little") for plane in uniforms for value in plane]
    return np.frombuffer(b"".join(parts), np.uint8)[None]


def oracle(row: np.ndarray, cols: int, extended: ByteStream) -> list[int]:
    """Return the integers of a row by integers of any length."""
    table = centre_table()
    data = row.tobytes()
    values = []
    for col in range(cols):
        pick = int.from_bytes(data[4 * col : 4 * col + 4], "little")
        column, low = divmod(pick, 1 << 19)
        other, threshold = divmod(int(table.packed[column]), 1 << 19)
        if low == threshold:
            drawn = bytearray(24)
            extended.write(memoryview(drawn))
            low = low << 192 | int.from_bytes(drawn, "little")
            threshold = threshold << 192 | table.extensions[column]
        centre = (column if low < threshold else other) - 4096
        places = [4 * cols + 2 * (plane * cols + col) for plane in range(4)]
        uniforms = sum(int.from_bytes(data[place : place + 2], "little") for place in places)
        values.append((centre << 16) + uniforms - 2 * (2**16 - 1))
    return values


def random_words(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows, BYTES * cols), dtype=np.uint8)


def drawn(words: np.ndarray, extension: object = stream) -> np.ndarray:
    into = np.full((len(words), words.shape[1] // BYTES), np.nan)
    spline_integers(words, extension, into, Memory.of(into.size))  # type: ignore[arg-type]
    return into


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_every_column_at_its_threshold(offset: int) -> None:
    """All 8,192 columns in one row; at equality the further bits are at their threshold, too."""
    table = centre_table()
    low = [min(max(int(one) % 2**19 + offset, 0), 2**19 - 1) for one in table.packed]
    words = row_of([column << 19 | one for column, one in enumerate(low)], [[0] * 8192] * 4)
    for further in (-1, 0, 1) if offset == 0 else (0,):
        equal = [
            min(max(tail + further, 0), 2**192 - 1)
            for tail, one, entry in zip(table.extensions, low, table.packed, strict=True)
            if one == int(entry) % 2**19
        ]
        expected = oracle(words, 8192, Fixed(*equal))
        source = Fixed(*equal)
        assert drawn(words, lambda row, source=source: source)[0].tolist() == expected
        assert source.numbers == []


@pytest.mark.parametrize("value", [0, 2**16 - 1])
def test_the_ends_of_the_uniforms(value: int) -> None:
    table = centre_table()
    column = next(at for at, one in enumerate(table.packed) if int(one) % 2**19 > 0)
    words = row_of([column << 19], [[value]] * 4)
    assert drawn(words, never).tolist() == [[(column - 4096) * 2**16 + 4 * value - 2 * 65535]]


@pytest.mark.parametrize("cols", [0, 1, 3, 500])
def test_random_words_give_the_integers_of_the_definition(cols: int) -> None:
    words = random_words(3, cols)
    assert drawn(words).tolist() == [oracle(row, cols, stream(at)) for at, row in enumerate(words)]


def with_equal_bits(words: np.ndarray) -> np.ndarray:
    """Return words of which each seventh needs further bits."""
    cols = words.shape[1] // BYTES
    picks = words[:, : 4 * cols].view("<u4")
    columns = picks[:, ::7] >> 19
    picks[:, ::7] = columns << 19 | centre_table().packed[columns] & (2**19 - 1)
    return words


@pytest.mark.parametrize("together", [1, 2, 5, 9])
@pytest.mark.parametrize("shape", [(5, 33), (70, 2)])
def test_rows_drawn_together_change_nothing(
    together: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = with_equal_bits(random_words(*shape))
    expected = drawn(words)
    for row in range(len(words)):
        assert np.array_equal(drawn(words[row : row + 1], lambda _: stream(row)), expected[[row]])  # noqa: B023
    further = [stream(at) for at in range(len(words))]
    expected = drawn(words, lambda row: further[row])  # each goes on
    monkeypatch.setattr(spline, "CHUNK_VALUES", together * shape[1])
    into = np.empty(shape)
    fill_rows([(Words(line), stream(at)) for at, line in enumerate(words)], into)
    assert np.array_equal(into, expected)


class Words:
    """A stream of given bytes."""

    def __init__(self, data: np.ndarray) -> None:
        self.left = data.tobytes()

    def write(self, into: memoryview) -> None:
        into[:], self.left = self.left[: len(into)], self.left[len(into) :]


def test_big_endian_words_give_the_same_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are not in the processor's order, as everywhere on a big-endian one."""
    words = with_equal_bits(random_words(2, 200))
    expected = drawn(words)
    swapped = words.copy()
    swapped[:, :800] = words[:, :800].view("<u4").byteswap().view(np.uint8)
    swapped[:, 800:] = words[:, 800:].view("<u2").byteswap().view(np.uint8)
    monkeypatch.setattr(spline, "_WORD", np.dtype(">u4"))
    monkeypatch.setattr(spline, "_HALF", np.dtype(">u2"))
    assert np.array_equal(drawn(swapped), expected)


def test_part_of_larger_memory_is_filled_and_nothing_else() -> None:
    words = random_words(3, 10)
    around = np.zeros((5, 20))
    spline_integers(words, stream, around[1:4, 5:15], Memory.of(30))
    assert np.array_equal(around[1:4, 5:15], drawn(words))
    around[1:4, 5:15] = 0
    assert (around == 0).all()


def test_words_are_not_changed() -> None:
    words = with_equal_bits(random_words(2, 40))
    before = words.copy()
    drawn(words)
    assert np.array_equal(words, before)
