import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedsim.core.streams import Purpose, seed_sequence, stream, streams


def test_same_key_same_stream() -> None:
    first = stream(3, Purpose.NOISE, client=4, round_number=5).standard_normal(8)
    again = stream(3, Purpose.NOISE, client=4, round_number=5).standard_normal(8)
    np.testing.assert_array_equal(first, again)


@given(
    seed=st.integers(0, 2**64 - 1),
    purpose=st.sampled_from(Purpose),
    client=st.integers(0, 2**32 - 1),
    round_number=st.integers(0, 2**32 - 1),
)
@example(seed=0, purpose=Purpose.SPLIT, client=0, round_number=0)
@example(seed=2**32, purpose=Purpose.NOISE, client=2**32 - 1, round_number=2**32 - 1)
def test_a_stream_is_numpys_of_the_seed_and_the_spawn_key(
    seed: int, purpose: Purpose, client: int, round_number: int
) -> None:
    expected = np.random.SeedSequence(seed, spawn_key=(int(purpose), client, round_number))
    found = seed_sequence(seed, purpose, client=client, round_number=round_number)
    np.testing.assert_array_equal(found.generate_state(8), expected.generate_state(8))


@pytest.mark.parametrize("count", [1, 63, 64, 200])
@pytest.mark.parametrize("purpose", [Purpose.SAMPLING, Purpose.NOISE])
def test_streams_made_at_once_are_those_made_one_by_one(count: int, purpose: Purpose) -> None:
    seeds, words = (0, 7, 2**32, 2**64 - 1), (0, 1, 5, 2**31, 2**32 - 1)
    keys = [(seeds[i % 4], words[i % 5], words[i // 5 % 5] or i) for i in range(count)]
    for (seed, client, number), found in zip(keys, streams(purpose, keys), strict=True):
        expected = stream(seed, purpose, client=client, round_number=number)
        assert found.bytes(40) == expected.bytes(40)
        np.testing.assert_array_equal(found.random(9), expected.random(9))


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


def test_large_seeds_do_not_alias_keys() -> None:
    # numpy joins seed and key into words: without limits, seed 2^32·c + s would be another key.
    draws = {
        stream(seed, Purpose.NOISE, client=client, round_number=r).bytes(16)
        for seed in (0, 1, 2**32, 2**32 + 1, 2**64 - 1)
        for client in (0, 1, 2**32 - 1)
        for r in (0, 1)
    }
    assert len(draws) == 30


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
    with pytest.raises(ValueError, match=message):
        stream(seed, purpose, client=client, round_number=round_number)
    for count in (1, 100):
        with pytest.raises(ValueError, match=message):
            streams(purpose, [(seed, client, round_number)] * count)
