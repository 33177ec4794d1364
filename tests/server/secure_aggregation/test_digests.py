"""Digests of vectors find every flipped bit; the ring's own checks cannot."""

import numpy as np
import pytest

from fedsim.server.secure_aggregation import digests
from fedsim.server.secure_aggregation.digests import check_tag, vector_tag
from fedsim.server.secure_aggregation.errors import ShareMismatchError


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
    vector = np.zeros(3, np.uint64)
    check_tag(vector, b"a", vector_tag(vector, b"a"), what="it", client=None)
    for other in (vector[:2], np.zeros(4, np.uint64)):
        with pytest.raises(ShareMismatchError, match="client 3: it does not match"):
            check_tag(other, b"a", vector_tag(vector, b"a"), what="it", client=3)
    with pytest.raises(ShareMismatchError):
        check_tag(vector, b"b", vector_tag(vector, b"a"), what="it", client=None)


def test_long_vectors_are_tagged_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_PIECE", 16)
    vector = np.arange(7, dtype=np.uint64)
    swapped = vector[[2, 3, 0, 1, 4, 5, 6]]
    assert len({vector_tag(v, b"i") for v in (vector, swapped, vector[:6])}) == 3
