"""A keystream is AES in counter mode, however it is requested."""

from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core import streams
from fedsim.core.streams import Keystream

LONG = 70_001


def blocks(key: bytes, length: int, segment: int = 0) -> bytes:
    """The stream by its definition: the encrypted numbers of its blocks."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    numbers = range(2, 2 - (-length // 16))
    counters = (segment.to_bytes(12, "big") + number.to_bytes(4, "big") for number in numbers)
    return cipher.update(b"".join(counters))[:length]


def written(key: bytes, lengths: Sequence[int]) -> bytes:
    stream, parts = Keystream(key), []
    for length in lengths:
        part = bytearray(length)
        stream.write(memoryview(part))
        parts.append(bytes(part))
    return b"".join(parts)


@settings(max_examples=25, deadline=None)
@given(
    gcm=st.booleans(),
    key=st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32),
    lengths=st.lists(st.sampled_from([0, 1, 16, 31, 400, LONG, 300_000]), min_size=1, max_size=5),
)
def test_the_bytes_are_those_of_counter_mode_in_either_mode(
    gcm: bool, key: bytes, lengths: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_gcm_is_faster", lambda: gcm)
        assert written(key, lengths) == blocks(key, sum(lengths))


@pytest.mark.parametrize("gcm", [True, False])
@pytest.mark.parametrize("size", [LONG, LONG + 1, LONG + 5, 3 * LONG - 7])
def test_each_segment_has_a_nonce_of_its_own(
    monkeypatch: pytest.MonkeyPatch, size: int, gcm: bool
) -> None:
    monkeypatch.setattr(streams, "_gcm_is_faster", lambda: gcm)
    monkeypatch.setattr(streams, "_SEGMENT_BYTES", size)
    key, lengths = bytes(range(16)), [LONG, 5, LONG, 5 * LONG]
    expected = b"".join(blocks(key, size, segment) for segment in range(8))
    assert written(key, lengths) == expected[: sum(lengths)]


def test_a_segment_ends_before_gcms_own_limit() -> None:
    """Its standard allows 2^39 - 256 bits under one nonce."""
    assert streams._SEGMENT_BYTES <= (2**39 - 256) // 8
