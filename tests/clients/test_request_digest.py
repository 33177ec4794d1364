"""The digest of a charge changes with everything that an answer depends on, and tells nothing."""

import hashlib
import inspect
from itertools import combinations
from typing import Any

import pytest

from fedsim.clients.account import request_digest
from fedsim.core.streams import Purpose, stream_key

INPUTS = dict[str, Any](
    seed=3,
    client=1,
    block=(1, 2, 13),
    padded_rows=16,
    model="a" * 64,
    clip_norm=0.5,
    mechanism="DpSgdMechanism(...)",
    conditions="b" * 64,
    data=b"c" * 32,
)
CHANGED: dict[str, list[Any]] = {
    "seed": [4, 31],
    "client": [2, 10],
    "block": [(1, 2), (1, 2, 3), (12, 13), (1, 21, 3), (2, 1, 13)],
    "padded_rows": [None, 32, 161],
    "model": ["a" * 63 + "b", ""],
    "clip_norm": [None, 0.5 + 2.0**-53, 1.0],
    "mechanism": ["DpSgdMechanism(....)", ""],
    "conditions": ["c" * 64, ""],
    "data": [None, b"d" * 32],
    "places": [16, 32],
    "sent": ["correction=" + "e" * 64, "correction=" + "f" * 64],
}


def test_every_ingredient_changes_the_digest() -> None:
    assert CHANGED.keys() == inspect.signature(request_digest).parameters.keys()
    others = [INPUTS | {name: value} for name, values in CHANGED.items() for value in values]
    digests = [request_digest(**inputs) for inputs in (INPUTS, *others)]
    assert len(set(digests)) == len(digests)


def test_no_ingredient_can_pose_as_a_part_of_its_neighbour() -> None:
    moved = {"mechanism": INPUTS["mechanism"] + "1", "conditions": INPUTS["conditions"][1:]}
    assert request_digest(**INPUTS | moved) != request_digest(**INPUTS)


@pytest.mark.parametrize("data", [INPUTS["data"], None])
def test_without_the_seed_a_guess_of_the_examples_cannot_be_tested(data: bytes | None) -> None:
    """Equal inputs look unrelated under each key: half of the bits differ."""
    keys = [(3, 1), (3, 2), (4, 1), (31, 0), (3, 10)]
    changes = ({"data": data, "seed": seed, "client": client} for seed, client in keys)
    digests = [request_digest(**INPUTS | change) for change in changes]
    for one, other in combinations(digests, 2):
        differing = bin(int(one, 16) ^ int(other, 16)).count("1")
        assert 80 < differing < 176, "of 256 bits; 6 standard deviations about 128"


def test_the_digest_is_stable() -> None:
    """Ledgers outlive processes: no hash seed may enter."""
    found = request_digest(**INPUTS)
    key = stream_key(3, Purpose.REQUEST_DIGEST, client=1)
    parts = ("1,2,13", "16", "a" * 64, "0.5", "DpSgdMechanism(...)", "b" * 64, (b"c" * 32).hex())
    text = "".join(f"{len(part)}:{part}" for part in parts).encode()
    assert found == hashlib.blake2b(text, digest_size=32, key=key).hexdigest()
