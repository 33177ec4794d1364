"""Tags of uploads: one for each value, in one call or in parts."""

import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsim.core.streams import Purpose, stream_key
from fedsim.protocol import upload_tags
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.upload_tags import UploadTags

VALUES = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.array(2.5),
    "none": np.zeros((0, 3), dtype=np.float32),
    "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
}


def reply(clip_norm: float | None = None) -> TrainReply:
    return TrainReply(VALUES, 5, None, clip_norm=clip_norm)


def test_a_tag_is_the_gmac_of_the_values() -> None:
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in VALUES.values())
    key, nonce = stream_key(3, Purpose.UPLOAD_TAG), struct.pack("<QI", 7, 2)
    for clip_norm, more in ((None, b""), (0.25, struct.pack("<d", 0.25))):
        expected = AESGCM(key).encrypt(nonce, b"", data + more).hex()
        assert UploadTags(3).of(2, 7, reply(clip_norm)) == expected


def test_very_large_updates_have_the_same_tag_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = UploadTags(3).of(2, 7, reply(0.5))
    monkeypatch.setattr(upload_tags, "_MOST_BYTES", 0)
    assert UploadTags(3).of(2, 7, reply(0.5)) == expected


def test_seed_client_round_and_every_bit_enter() -> None:
    tags = {UploadTags(seed).of(k, n, reply()) for seed in (0, 1) for k in (0, 1) for n in (1, 2)}
    tags.add(UploadTags(0).of(0, 1, reply(0.5)))
    for place in range(12 * 32):
        bits = VALUES["w"].copy().view(np.uint32)
        bits.flat[place // 32] ^= np.uint32(1 << place % 32)
        changed = {**VALUES, "w": bits.view(np.float32)}
        tags.add(UploadTags(0).of(0, 1, TrainReply(changed, 5, None)))
    assert len(tags) == 9 + 12 * 32
