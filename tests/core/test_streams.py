"""Streams are keyed by a hash of every field: reproducible, distinct and independent."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from fedsim.core.streams import KEY_BYTES, Purpose, generator_of, stream, stream_key, torch_seed

FIELDS = st.tuples(
    st.integers(0, 2**64 - 1),
    st.sampled_from(Purpose),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


def key_of(fields: tuple[int, Purpose, int, int]) -> bytes:
    seed, purpose, client, round_number = fields
    return stream_key(seed, purpose, client=client, round_number=round_number)


def test_the_scheme_is_that_of_all_recorded_runs() -> None:
    """Another key or another draw is another scheme: runs of this schema could not continue."""
    assert stream_key(3, Purpose.NOISE, client=4, round_number=5).hex() == (
        "20e2dc7339508178cbb38140e497a7fc9a66c1e30a38bc928ba0b062353f3803"
    )
    assert stream_key(2**64 - 1, Purpose.SPLIT).hex() == (
        "6339645ea4b30b5df43ace06882acc20898072fb61240816bc3f495a9560bd27"
    )
    generator = stream(3, Purpose.SAMPLING, client=4, round_number=5)
    assert generator.bit_generator.random_raw(2).tolist() == [
        16998690568928941230,
        16555464164222012623,
    ]
    assert torch_seed(stream_key(0, Purpose.MODEL)) == 8743923765658526170


@given(one=FIELDS, other=FIELDS)
@example(one=(0, Purpose.NOISE, 1, 0), other=(0, Purpose.NOISE, 0, 1))
@example(one=(2**32, Purpose.NOISE, 0, 0), other=(0, Purpose.NOISE, 1, 0))
def test_keys_are_equal_where_all_fields_are(
    one: tuple[int, Purpose, int, int], other: tuple[int, Purpose, int, int]
) -> None:
    assert (key_of(one) == key_of(other)) == (one == other)
    assert len(key_of(one)) == KEY_BYTES


def test_no_two_keys_of_an_experiment_agree_in_the_bits_that_a_use_takes() -> None:
    keys = [
        stream_key(seed, purpose, client=client, round_number=number)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for purpose in (Purpose.SAMPLING, Purpose.NOISE)
        for client in range(50)
        for number in range(50)
    ]
    assert len({key[:16] for key in keys}) == len(keys) == 20_000
    assert len({torch_seed(key) for key in keys}) == len(keys)
    # Each of 256 bits is one in half of the keys, within 5.5 standard errors: 1e-5 for all.
    ones = np.unpackbits(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES), axis=1)
    assert np.abs(ones.mean(axis=0) - 0.5).max() < 5.5 * 0.5 / np.sqrt(len(keys))


def test_every_part_of_the_key_gives_another_uncorrelated_stream() -> None:
    # 6 streams of 20,000: |correlation| > 0.04 has a false-alarm rate of 2e-7 for all 15 pairs.
    keys = [
        stream(3, Purpose.NOISE, client=4, round_number=5),
        stream(4, Purpose.NOISE, client=4, round_number=5),
        stream(3, Purpose.SAMPLING, client=4, round_number=5),
        stream(3, Purpose.NOISE, client=5, round_number=5),
        stream(3, Purpose.NOISE, client=4, round_number=6),
        stream(3, Purpose.NOISE, client=5, round_number=4),
    ]
    correlation = np.corrcoef([generator.standard_normal(20_000) for generator in keys])
    assert np.abs(correlation - np.eye(len(keys))).max() < 0.04


@pytest.mark.parametrize("field", ["client", "round_number", "seed"])
def test_first_draws_of_consecutive_keys_are_uniform_and_uncorrelated(field: str) -> None:
    """A generator keyed by a counter without a hash can fail here; false-alarm rate 2e-6."""
    fields: dict[str, Any] = {"seed": 0, "purpose": Purpose.SAMPLING}
    draws = [stream(**{**fields, field: number}).random() for number in range(10_000)]
    assert stats.kstest(draws, "uniform").pvalue > 1e-6
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) * np.sqrt(len(draws)) < 5


def test_a_stream_is_philox_of_the_key_and_draws_no_entropy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = stream_key(3, Purpose.FAULT)
    expected = np.random.Philox(key=int.from_bytes(key[:16], "little"))

    def refuse(size: int) -> bytes:
        raise AssertionError("entropy from the operating system")

    monkeypatch.setattr(random, "_urandom", refuse)
    with pytest.raises(AssertionError, match="entropy"):
        np.random.default_rng()
    found = generator_of(key).bit_generator.random_raw(9)
    np.testing.assert_array_equal(found, expected.random_raw(9))


def test_a_seed_of_torch_has_63_bits() -> None:
    assert torch_seed(bytes(KEY_BYTES)) == 0
    assert torch_seed(b"\xff" * KEY_BYTES) == 2**63 - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, Purpose.NOISE, 0, 0), "seed must be in"),
        ((2**64, Purpose.NOISE, 0, 0), "seed must be in"),
        ((0, Purpose.NOISE, 2**32, 0), "client must be in"),
        ((0, Purpose.NOISE, 0, -1), "round must be in"),
    ],
)
def test_out_of_range_keys_are_refused(arguments: tuple, message: str) -> None:
    seed, purpose, client, round_number = arguments
    for make in (stream, stream_key):
        with pytest.raises(ValueError, match=message):
            make(seed, purpose, client=client, round_number=round_number)
