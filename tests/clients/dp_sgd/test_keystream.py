"""A keystream is AES in counter mode, whatever makes it."""

from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.clients.dp_sgd import keystream
from fedsim.clients.dp_sgd.keystream import Keystream

LONG = 70_001


def blocks(key: bytes, length: int) -> bytes:
    """The stream by its definition: the encrypted numbers of its blocks."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    counters = (number.to_bytes(16, "big") for number in range(-(-length // 16)))
    return cipher.update(b"".join(counters))[:length]


def written(key: bytes, lengths: Sequence[int]) -> bytes:
    stream, parts = Keystream(key), []
    for length in lengths:
        part = bytearray(length)
        stream.write(memoryview(part))
        parts.append(bytes(part))
    return b"".join(parts)


@pytest.mark.parametrize("by_gcm", [True, False])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    key=st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32),
    lengths=st.lists(st.sampled_from([0, 1, 16, 31, 400, LONG, 300_000]), min_size=1, max_size=5),
)
def test_the_bytes_are_those_of_counter_mode(
    monkeypatch: pytest.MonkeyPatch, by_gcm: bool, key: bytes, lengths: list[int]
) -> None:
    monkeypatch.setattr(keystream, "_gcm_is_faster", lambda: by_gcm)
    assert written(key, lengths) == blocks(key, sum(lengths))


@pytest.mark.parametrize("most", [LONG, LONG + 1, LONG + 5, 3 * LONG - 7])
def test_it_goes_on_where_gcm_has_to_end(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(keystream, "_gcm_is_faster", lambda: True)
    monkeypatch.setattr(keystream, "_MAX_GCM_BYTES", most)
    key, lengths = bytes(range(16)), [LONG, 5, LONG, LONG]
    assert written(key, lengths) == blocks(key, sum(lengths))


def test_gcm_is_left_before_its_own_limit() -> None:
    """Its standard allows 2^39 - 256 bits under one nonce; the first two blocks are not its."""
    assert keystream._MAX_GCM_BYTES - 32 <= (2**39 - 256) // 8
