"""The keystream: test vectors of the standards; it depends on every bit of the seed."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsim.secagg.masks import SeedExpander, derive_key, new_seed

U64 = np.dtype(np.uint64)


def stream(algorithm: Any, key: bytes, count: int) -> bytes:
    return mask(SeedExpander(algorithm), key, count, U64).astype("<u8").tobytes()


def mask(expander: SeedExpander, key: bytes, length: int, dtype: Any) -> NDArray[Any]:
    vector: NDArray[Any] = np.zeros(length, dtype)
    expander.add_into(vector, [key])
    return vector


def test_aes256_of_sp_800_38a() -> None:
    """Appendix F.1.5 gives AES-256 of single blocks; counter mode encrypts 2, 3, 4 and so on."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    assert ecb.update(block).hex() == "f3eed1bdb5d2a03c064b5a7e3db181f8"
    counters = b"".join(i.to_bytes(16, "big") for i in range(2, 66))
    assert stream("aes256_ctr", key, 128) == ecb.update(counters)


def test_aes256_of_the_gcm_specification() -> None:
    """Test case 14: zero key, zero nonce, one zero block."""
    assert stream("aes256_ctr", bytes(32), 2).hex() == "cea7403d4d606b6e074ec5d3baf39d18"


def test_chacha20_of_rfc_8439() -> None:
    """Appendix A.1, test vector 1: zero key, zero nonce, counter 0."""
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert stream("chacha20", bytes(32), 8).hex() == expected


def test_hkdf_of_rfc_5869() -> None:
    """Test case 3: no salt, no info; the first 32 of its 42 bytes."""
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert derive_key(b"\x0b" * 22, b"").hex() == expected


def _xor_folded(seed: bytes, info: bytes) -> bytes:
    """A broken derivation: the seed is folded to 32 bits first."""
    folded = bytes(a ^ b for a, b in zip(seed[:16], seed[16:], strict=True))[:4]
    return derive_key(folded, info)


def _changes_with_all_flips(derive: Any) -> bool:
    seed = bytearray(bytes(range(32)))
    seen = set()
    near_and_far = itertools.product(range(128), (1, 8, 32, 64, 128))
    flips = [(), *((i,) for i in range(256)), *((i, i + d) for i, d in near_and_far)]
    for flip in flips:
        for bit in flip:
            seed[bit // 8] ^= 1 << bit % 8
        seen.add(derive(bytes(seed), b"info"))
        for bit in flip:
            seed[bit // 8] ^= 1 << bit % 8
    return len(seen) == len(flips)


def test_every_bit_and_pairs_of_bits_of_the_seed_count() -> None:
    assert _changes_with_all_flips(derive_key)
    assert not _changes_with_all_flips(_xor_folded)


@given(
    length=st.integers(0, 70_000),
    streams=st.integers(0, 3),
    algorithm=st.sampled_from(["aes256_ctr", "chacha20"]),
    dtype=st.sampled_from([np.uint32, np.uint64]),
)
@settings(max_examples=25, deadline=None)
def test_blocks_and_groups_do_not_show(
    length: int, streams: int, algorithm: Any, dtype: Any
) -> None:
    expander, keys = SeedExpander(algorithm), [bytes([i]) * 32 for i in range(streams)]
    start = np.arange(length, dtype=dtype)
    added = start.copy()
    expander.add_into(added, keys)
    masks = [mask(expander, key, length, dtype) for key in keys]
    np.testing.assert_array_equal(added, start + sum(masks, np.zeros(length, dtype)))
    expander.add_into(added, keys, subtract=True)
    np.testing.assert_array_equal(added, start)


def test_more_streams_than_a_group() -> None:
    expander, keys = SeedExpander(), [i.to_bytes(32, "big") for i in range(130)]
    total = np.zeros(5, np.uint64)
    expander.add_into(total, keys)
    for key in keys:
        expander.add_into(total, [key], subtract=True)
    assert not total.any()


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 16"):
        mask(SeedExpander(), bytes(16), 1, U64)


def test_seeds_are_32_bytes_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda n: b"x" * n)
    assert new_seed() == b"x" * 32
