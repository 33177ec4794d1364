"""Sums of integers, the server's noise on them, and the model that follows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from scipy import stats

from fedsim.noise.correlated.strategies import BandedStrategy
from fedsim.noise.sources import DEVIATION, NoiseSource
from fedsim.protocol.arrays import to_arrays, to_numpy
from fedsim.protocol.messages import TrainReply
from fedsim.protocol.noisy_sums import CLIP_COUNT, SumPlan
from fedsim.server.aggregation.aggregator import InvalidUpdateError, RoundAbortedError
from fedsim.server.aggregation.noisy_sum import IntegerSum, NoisySum, ServerNoise, add_noise
from fedsim.server.aggregation.weights import ClientWeights, uniform_weights
from fedsim.server.secure.opened_sums import NO_OPENED_SUMS, OpenedSum, OpenedSums

PLAN = SumPlan(unit=-0.25, bound=1 << 40, shapes={"w": (2,), "b": ()}, server_noise=False)
MODEL = {"w": np.array([1.0, 2.0], np.float32), "b": np.float32(0.0), "frozen": np.ones(1)}
SILENT = ServerNoise(0)


def integers(*values: int, b: int = 0) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.int64), "b": np.array(b, np.int64)}


def reply(values: Mapping[str, np.ndarray]) -> TrainReply:
    return TrainReply(values, 0, None)


def begin(aggregator: NoisySum, clients: Sequence[int], number: int = 1) -> None:
    model = to_arrays({name: np.asarray(value) for name, value in MODEL.items()})
    aggregator.begin(number, model, clients, cast("Any", None))


def round_of(
    aggregator: NoisySum, uploads: Mapping[int, Mapping[str, np.ndarray]], number: int = 1
) -> Any:
    begin(aggregator, sorted(uploads), number)
    for client, values in uploads.items():
        aggregator.add(client, reply(values))
    return aggregator.finish()


def noisy(
    plan: SumPlan = PLAN,
    weights: ClientWeights | None = None,
    noise: ServerNoise = SILENT,
    **rest: Any,
) -> NoisySum:
    sums = IntegerSum(plan, num_clients=4)
    return NoisySum(sums, plan, weights or uniform_weights(4), noise, **rest)


def test_the_model_moves_by_the_unit_times_the_sum_over_the_weights_of_those_who_came() -> None:
    weights = ClientWeights("examples", (1, 2, 3, 4))
    result = round_of(noisy(weights=weights), {1: integers(8, 0, b=4), 3: integers(4, -12)})
    model = to_numpy(result.arrays)
    np.testing.assert_array_equal(model["w"], np.array([0.5, 2.5], np.float32))
    assert model["b"] == np.float32(-0.25 * 4 / 6)
    np.testing.assert_array_equal(model["frozen"], [1.0])
    assert [value.dtype for value in model.values()] == [np.float32, np.float32, np.float64]
    assert result.sums is None


def test_a_public_divisor_takes_the_place_of_the_weights() -> None:
    result = round_of(noisy(replace(PLAN, divisor=10.0)), {0: integers(40, 0)})
    assert to_numpy(result.arrays)["w"][0] == 0.0


def test_without_clients_only_a_public_divisor_gives_a_model() -> None:
    assert round_of(noisy(), {}).arrays is None
    plan = replace(PLAN, divisor=10.0, server_noise=True)
    result = round_of(noisy(plan, secret=True), {})
    assert not np.array_equal(to_numpy(result.arrays)["w"], MODEL["w"])


def test_the_bound_of_the_round_scales_the_unit_and_the_count_is_handed_on() -> None:
    plan = replace(PLAN, shapes={**PLAN.shapes, CLIP_COUNT: (1,)})
    aggregator = noisy(plan)
    aggregator.scale(0.5)
    uploads = {0: {**integers(8, 0), CLIP_COUNT: np.array([-7], np.int64)}}
    result = round_of(aggregator, uploads)
    assert result.clip_count == -7
    assert to_numpy(result.arrays)["w"][0] == 0.0
    assert CLIP_COUNT not in to_numpy(result.arrays)


def test_sums_are_exact_where_floats_are_not() -> None:
    plan = replace(PLAN, bound=1 << 60, unit=1.0)
    sums = IntegerSum(plan, num_clients=3)
    sums.begin(1, to_arrays({}), range(3), cast("Any", None))
    for client, value in enumerate((1 << 60, 1, 1 - (1 << 60))):
        sums.add(client, reply(integers(value, 0)))
    found = sums.finish().sums
    assert found is not None
    assert found["w"][0] == 2


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"w": np.zeros(2, np.int64)}, "missing \\['b'\\]"),
        ({"b": np.zeros((), np.int64), "w": np.zeros(2, np.int64)}, "arrays differ"),
        ({**integers(0, 0), "w": np.zeros(3, np.int64)}, "must be int64\\[2\\], got int64\\[3\\]"),
        ({**integers(0, 0), "w": np.zeros(2)}, "got float64"),
        (integers((1 << 40) + 1, 0), "beyond ±1099511627776"),
        (integers(0, -(1 << 63)), "beyond"),  # it has no |value|
    ],
)
def test_a_wrong_upload_is_not_in_the_sum(values: dict[str, np.ndarray], what: str) -> None:
    aggregator = noisy()
    begin(aggregator, [0, 1])
    with pytest.raises(InvalidUpdateError, match=what):
        aggregator.add(0, reply(values))
    aggregator.add(1, reply(integers(4, 0)))
    arrays = aggregator.finish().arrays
    assert arrays is not None
    assert to_numpy(arrays)["w"][0] == 0.0


def test_more_clients_than_int64_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into an int64 sum"):
        IntegerSum(replace(PLAN, bound=1 << 61), num_clients=3)


def test_tied_tensors_get_one_draw() -> None:
    plan = replace(PLAN, shapes={"w": (2,), "b": (), "twin": (2,)}, server_noise=True)
    aggregator = noisy(plan, tied={"twin": "w"})
    upload = {**integers(3, 4), "twin": np.array([3, 4], np.int64)}
    model = to_numpy(round_of(aggregator, {0: upload}).arrays)
    np.testing.assert_array_equal(model["twin"], model["w"])


class _Smaller(NoiseSource):
    """Noise that is too small by 3 %: what the test of the law must reject."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source

    def fill_(self, values: Any) -> Any:
        return self._source.fill_(values).mul_(0.97).round_()


@pytest.mark.parametrize("seed", [5, None])
def test_the_noise_is_one_rounded_normal_of_the_grid_for_each_coordinate(seed: int | None) -> None:
    # False-alarm rate 1e-6 each, of the variance and of the law. Noise 3 % smaller passes with
    # probability 1e-6, too: its variance is 10 standard deviations away, and 5 are the bound.
    size = 60_000
    sums = {"w": np.arange(size, dtype=np.int64).reshape(100, 600), "b": np.zeros((), np.int64)}

    def accepted(source: NoiseSource) -> bool:
        drawn = add_noise(sums, source)["w"] - sums["w"]
        scaled = drawn.ravel() / DEVIATION
        tail = stats.chi2(size).cdf(float((scaled**2).sum()))
        law = stats.kstest(scaled, "norm").pvalue
        return min(tail, 1.0 - tail) > 0.5e-6 and law > 1e-6

    assert accepted(ServerNoise(seed).source(3))
    assert not accepted(_Smaller(ServerNoise(seed).source(3)))


def test_seeded_noise_is_that_of_seed_and_round() -> None:
    sums = integers(0, 0)
    same, other, round_2 = (
        add_noise(sums, ServerNoise(seed).source(number))
        for seed, number in ((0, 1), (1, 1), (0, 2))
    )
    again = add_noise(integers(5, 5), ServerNoise(0).source(1))
    np.testing.assert_array_equal(again["w"] - 5, same["w"])
    assert len({tuple(one["w"]) for one in (same, other, round_2)}) == 3


def test_the_record_is_written_before_noise_is_drawn() -> None:
    events: list[object] = []

    class Noise(ServerNoise):
        def source(self, round_number: int) -> NoiseSource:
            events.append("noise")
            return super().source(round_number)

    opened = OpenedSums(None, events.append)
    plan = replace(PLAN, server_noise=True)
    round_of(
        noisy(plan, noise=Noise(0), opened_sums=opened), {2: integers(1, 2), 0: integers(3, 4)}
    )
    record, drawn = events
    assert drawn == "noise"
    assert isinstance(record, OpenedSum)
    assert (record.round_number, record.clients) == (1, (0, 2))
    assert record.digest == ServerNoise(0).digest(1, integers(4, 6))


def resumed(record: OpenedSum, **options: Any) -> tuple[NoisySum, list[OpenedSum]]:
    saved: list[OpenedSum] = []
    plan = replace(PLAN, server_noise=True)
    return noisy(plan, opened_sums=OpenedSums(record, saved.append), **options), saved


def first_record(uploads: Mapping[int, Mapping[str, np.ndarray]], **options: Any) -> OpenedSum:
    saved: list[OpenedSum] = []
    plan = replace(PLAN, server_noise=True)
    round_of(noisy(plan, opened_sums=OpenedSums(None, saved.append), **options), uploads)
    return saved[-1]


def test_after_a_crash_the_same_sum_gets_the_same_bits() -> None:
    uploads = {0: integers(1, 2), 1: integers(3, 4)}
    before = round_of(noisy(replace(PLAN, server_noise=True)), uploads)
    aggregator, saved = resumed(first_record(uploads))
    again = round_of(aggregator, uploads)
    np.testing.assert_array_equal(to_numpy(again.arrays)["w"], to_numpy(before.arrays)["w"])
    assert saved == [first_record(uploads)]


@pytest.mark.parametrize(
    "second",
    [
        {0: integers(1, 2)},  # a client is missing
        {0: integers(1, 2), 1: integers(3, 5)},  # a client sends another contribution
    ],
)
def test_after_a_crash_another_sum_of_the_round_is_given_up(
    second: Mapping[int, Mapping[str, np.ndarray]],
) -> None:
    aggregator, saved = resumed(first_record({0: integers(1, 2), 1: integers(3, 4)}))
    with pytest.raises(RoundAbortedError, match="noise was added to another sum of this round"):
        round_of(aggregator, second)
    assert saved == []
    assert round_of(aggregator, second, number=2).arrays is not None


def test_after_a_crash_a_client_that_was_not_in_the_sum_waits_for_the_next_round() -> None:
    aggregator, _ = resumed(first_record({0: integers(1, 2)}))
    begin(aggregator, [0, 3])
    aggregator.add(0, reply(integers(1, 2)))
    with pytest.raises(InvalidUpdateError, match="next round"):
        aggregator.add(3, reply(integers(9, 9)))
    assert aggregator.finish().arrays is not None


def given_up(noise: ServerNoise, opened_sums: OpenedSums = NO_OPENED_SUMS) -> np.ndarray | None:
    plan = replace(PLAN, divisor=10.0, server_noise=True)
    aggregator = noisy(plan, noise=noise, opened_sums=opened_sums)
    begin(aggregator, [0, 1])
    released = aggregator.give_up().arrays
    return None if released is None else to_numpy(released)["w"]


def test_a_round_given_up_releases_noise_that_no_sum_got() -> None:
    """Beside a sum that got the same noise before a crash, noise alone would reveal the sum."""
    noise = ServerNoise(0, BandedStrategy((1.0, 0.5)))
    saved: list[OpenedSum] = []
    released = given_up(noise, OpenedSums(None, saved.append))
    assert released is not None
    assert not np.array_equal(released, MODEL["w"])
    again = given_up(noise, OpenedSums(saved[0]))  # after a crash
    np.testing.assert_array_equal(again, released)
    digest = noise.digest(1, integers(4, 6))
    for clients in ((0, 1), ()):
        assert given_up(noise, OpenedSums(OpenedSum(1, clients, digest))) is None
    assert given_up(ServerNoise(0)) is None  # no later round cancels it


def test_a_second_crash_keeps_the_digest_of_the_first_sum() -> None:
    record = first_record({0: integers(1, 2)})
    saved: list[OpenedSum] = []
    # The parties of secure aggregation record the set before the sum is known.
    OpenedSums(record, saved.append).record_opening(1, [0])
    assert saved == [record]


def test_a_secret_draw_leaves_no_client_in_the_record() -> None:
    uploads = {0: integers(1, 2), 3: integers(3, 4)}
    assert first_record(uploads, secret=True).clients == ()
    aggregator, _ = resumed(first_record(uploads, secret=True), secret=True)
    assert round_of(aggregator, uploads).arrays is not None
    with pytest.raises(RoundAbortedError):
        round_of(aggregator, {0: integers(1, 2)})


def test_a_secret_draw_with_noise_that_cannot_be_repeated_leaves_no_record() -> None:
    # Each attempt has clients, noise and a charge of its own.
    saved: list[OpenedSum] = []
    plan = replace(PLAN, server_noise=True, divisor=2.0)
    aggregator = noisy(
        plan, noise=ServerNoise(None), opened_sums=OpenedSums(None, saved.append), secret=True
    )
    first = to_numpy(round_of(aggregator, {}).arrays)["w"]
    assert not np.array_equal(to_numpy(round_of(aggregator, {}).arrays)["w"], first)
    assert saved == []


def test_clients_that_add_the_noise_need_no_record() -> None:
    saved: list[OpenedSum] = []
    aggregator = noisy(opened_sums=OpenedSums(None, saved.append))
    round_of(aggregator, {0: integers(1, 2)})
    assert saved == []
    assert NO_OPENED_SUMS.previous is None


def test_the_digest_of_a_sum_is_keyed() -> None:
    sums = integers(1, 2)
    digests = {ServerNoise(seed).digest(number, sums) for seed, number in ((0, 1), (1, 1), (0, 2))}
    assert len(digests) == 3
    assert ServerNoise(None).digest(1, sums) == ""
    other: Sequence[dict[str, np.ndarray]] = (integers(2, 1), {"b": sums["b"], "w": sums["w"]})
    assert ServerNoise(0).digest(1, sums) not in {ServerNoise(0).digest(1, one) for one in other}


def test_noise_of_a_large_sum_stays_exact() -> None:
    sums = {"w": np.array([1 << 61, -(1 << 61)], np.int64)}
    drawn = add_noise(sums, ServerNoise(0).source(1))["w"] - sums["w"]
    plain = add_noise({"w": np.zeros(2, np.int64)}, ServerNoise(0).source(1))["w"]
    np.testing.assert_array_equal(drawn, plain)
