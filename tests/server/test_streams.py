import numpy as np
import pytest

from fedsim.server.streams import Purpose, stream


def test_same_key_same_stream() -> None:
    first = stream(3, Purpose.NOISE, client=4, round_number=5).standard_normal(8)
    again = stream(3, Purpose.NOISE, client=4, round_number=5).standard_normal(8)
    np.testing.assert_array_equal(first, again)


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
