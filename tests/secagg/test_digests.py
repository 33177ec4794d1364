"""Digests of vectors find every flipped bit; the ring's own checks cannot."""

import numpy as np
import pytest

from fedsim.secagg import digests
from fedsim.secagg.digests import vector_tag, verify_and_add
from fedsim.secagg.errors import ShareMismatchError


def test_every_single_bit_counts() -> None:
    vector = np.arange(9, dtype=np.uint64)
    tags = {vector_tag(vector, b"info")}
    for place in range(9):
        for bit in range(64):
            bad = vector.copy()
            bad[place] ^= np.uint64(1 << bit)
            tags.add(vector_tag(bad, b"info"))
    assert len(tags) == 1 + 9 * 64


def test_length_and_context_count() -> None:
    vector = np.arange(3, dtype=np.uint64)
    tag = vector_tag(vector, b"a")
    total = np.full(3, 9, np.uint64)
    verify_and_add(total, vector, b"a", tag, name="it", client=None)
    assert total.tolist() == [9, 10, 11]
    for info, other in ((b"b", tag), (b"a", tag[:-1]), (b"a", bytes(16))):
        with pytest.raises(ShareMismatchError, match="client 3: it does not match"):
            verify_and_add(total, vector, info, other, name="it", client=3)
    assert total.tolist() == [9, 10, 11]  # refused vectors change nothing
    assert (
        len({vector_tag(v, b"a") for v in (vector, vector[:2], np.append(vector, vector[:1]))}) == 3
    )


def test_blocks_and_strides_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = np.arange(7, dtype=np.uint64)
    whole = vector_tag(vector, b"i")
    monkeypatch.setattr(digests, "_BLOCK_ELEMENTS", 2)
    assert vector_tag(vector, b"i") == whole
    assert vector_tag(np.repeat(vector, 2)[::2], b"i") == whole
    assert vector_tag(vector[[2, 3, 0, 1, 4, 5, 6]], b"i") != whole
