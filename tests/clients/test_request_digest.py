"""The digest of a charge changes with everything that an answer depends on, and tells nothing."""

import hashlib
from dataclasses import fields, replace
from itertools import combinations

import pytest

from fedsim.clients.account import AnswerInputs, request_digest
from fedsim.core.streams import Purpose, stream_key

INPUTS = AnswerInputs(
    block=(1, 2, 13),
    padded_rows=16,
    model="a" * 64,
    clip_norm=0.5,
    mechanism="DpSgdMechanism(...)",
    conditions="b" * 64,
    data=b"c" * 32,
)
CHANGED = {
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
    assert CHANGED.keys() == {field.name for field in fields(AnswerInputs)}
    others = [replace(INPUTS, **{name: v}) for name, values in CHANGED.items() for v in values]
    digests = [request_digest(inputs, seed=3, client=1) for inputs in (INPUTS, *others)]
    assert len(set(digests)) == len(digests)
    assert digests[0] == request_digest(replace(INPUTS), seed=3, client=1)


def test_no_ingredient_can_pose_as_a_part_of_its_neighbour() -> None:
    moved = replace(INPUTS, mechanism=INPUTS.mechanism + "1", conditions=INPUTS.conditions[1:])
    assert request_digest(moved, seed=3, client=1) != request_digest(INPUTS, seed=3, client=1)


@pytest.mark.parametrize("data", [INPUTS.data, None])
def test_without_the_seed_a_guess_of_the_examples_cannot_be_tested(data: bytes | None) -> None:
    """Equal inputs look unrelated under each key: half of the bits differ."""
    inputs = replace(INPUTS, data=data)
    keys = [(3, 1), (3, 2), (4, 1), (31, 0), (3, 10)]
    digests = [request_digest(inputs, seed=seed, client=client) for seed, client in keys]
    for one, other in combinations(digests, 2):
        differing = bin(int(one, 16) ^ int(other, 16)).count("1")
        assert 80 < differing < 176, "of 256 bits; 6 standard deviations about 128"


def test_the_digest_is_stable() -> None:
    """Ledgers outlive processes: neither hash seeds nor the order of fields may enter."""
    found = request_digest(INPUTS, seed=3, client=1)
    assert found == request_digest(AnswerInputs(**vars(INPUTS)), seed=3, client=1)
    key = stream_key(3, Purpose.REQUEST_DIGEST, client=1)
    parts = ("1,2,13", "16", "a" * 64, "0.5", "DpSgdMechanism(...)", "b" * 64, (b"c" * 32).hex())
    text = "".join(f"{len(part)}:{part}" for part in parts).encode()
    assert found == hashlib.blake2b(text, digest_size=32, key=key).hexdigest()
