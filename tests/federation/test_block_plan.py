"""Blocks of clients: a function of the experiment, each participant once, within one range."""

import pickle
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fedsim.federation.blocks import MAX_BATCH_RATIO, MAX_RANGES, BlockPlan
from fedsim.server.participation.participation import Participation
from fedsim.simulation.ray.engine import longest_first

EQUAL_BATCHES, BATCHES = st.just(16.0), st.floats(0.5, 64)


@st.composite
def plans(draw: st.DrawFn, batches: st.SearchStrategy[float] = EQUAL_BATCHES) -> BlockPlan:
    """Draw a plan of up to 80 clients."""
    clients = draw(st.integers(1, 80))
    participation = Participation(
        draw(st.integers(0, 9)), clients, draw(st.integers(1, clients)), rounds=3
    )
    expected = st.lists(batches, min_size=clients, max_size=clients)
    free = draw(st.sampled_from((0, 100)))
    return BlockPlan(participation, draw(st.integers(1, 40)), tuple(draw(expected)), free)


@given(plans(BATCHES), st.integers(1, 3))
def test_every_participant_is_in_exactly_one_block(plan: BlockPlan, number: int) -> None:
    blocks = plan.blocks(number)
    scheduled = plan.participation.in_round(number)
    assert tuple(client for block in blocks for client in block) == scheduled, "ascending"
    for block in blocks:
        assert 1 <= len(block) <= plan.max_clients
        batches = [plan.expected_batches[client] for client in block]
        padding = len(block) * max(batches) - sum(batches)
        is_cheap = padding <= plan.free_padding + 1e-9
        assert is_cheap or max(batches) <= MAX_BATCH_RATIO * min(batches)
        for client in block:
            assert plan.block_of(number, client) == block
    for client in set(range(plan.participation.num_clients)) - set(scheduled):
        assert plan.block_of(number, client) == (client,)


@given(plans(BATCHES), st.integers(1, 3))
def test_a_block_lies_in_one_range(plan: BlockPlan, number: int) -> None:
    of = {client: part for part, clients in enumerate(plan.ranges) for client in clients}
    assert sorted(of) == list(range(plan.participation.num_clients))
    assert 1 <= len(plan.ranges) <= min(MAX_RANGES, plan.participation.num_clients)
    assert all(one.stop == other.start for one, other in pairwise(plan.ranges))
    assert all(len({of[client] for client in block}) == 1 for block in plan.blocks(number))


@given(plans(), st.integers(1, 3))
def test_blocks_of_a_range_are_even(plan: BlockPlan, number: int) -> None:
    for clients in plan.ranges:
        sizes = [len(block) for block in plan.blocks(number) if block[0] in clients]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        assert len(sizes) == -(-sum(sizes) // plan.max_clients)


@given(plans(BATCHES), st.integers(1, 9))
def test_every_worker_forms_the_same_blocks(plan: BlockPlan, workers: int) -> None:
    """Workers get the plan by pickle and own whole ranges; rounds come in any order."""
    shares = longest_first([float(len(clients)) for clients in plan.ranges], workers)
    copies = [pickle.loads(pickle.dumps(plan)) for _ in shares]
    for number in (3, 1, 2):
        found = {
            copy.block_of(number, client)
            for share, copy in zip(shares, copies, strict=True)
            for part in share
            for client in copy.ranges[part]
            if client in plan.participation.in_round(number)
        }
        assert found == set(plan.blocks(number))


def plan_of(clients: int, max_clients: int, *, per_round: int | None = None) -> BlockPlan:
    participation = Participation(0, clients, per_round or clients, rounds=2)
    return BlockPlan(participation, max_clients, (16.0,) * clients)


def test_ranges_hold_about_a_block_and_are_even_in_number() -> None:
    assert [len(part) for part in plan_of(1_000, 125).ranges] == [125] * 8
    assert len(plan_of(200, 16).ranges) == 14
    many = plan_of(10_000, 128)
    assert (len(many.ranges), len(many.blocks(1))) == (40, 80), "64 ranges would have 128 blocks"
    assert len(plan_of(1_000, 16, per_round=100).ranges) == 8
    assert plan_of(3, 4).ranges == (range(3),)
    assert len(plan_of(3, 1).ranges) == 3


def test_blocks_split_where_padding_takes_longer_than_another_block() -> None:
    def blocks(free_padding: int, max_clients: int = 8) -> tuple[tuple[int, ...], ...]:
        batches = (10.0, 20.0, 21.0, 12.0, 5.0, 0.0, 0.0)
        participation = Participation(0, 7, 7, rounds=1)
        return BlockPlan(participation, max_clients, batches, free_padding).blocks(1)

    assert blocks(0) == ((0, 1), (2, 3), (4,), (5, 6))
    assert blocks(11) == ((0, 1), (2, 3), (4, 5, 6)), "12 rows pad the second block to 21"
    assert blocks(12) == ((0, 1, 2), (3, 4), (5, 6))
    assert blocks(1_000) == ((0, 1, 2, 3, 4, 5, 6),)
    assert blocks(1_000, 4) == ((0, 1, 2), (3, 4, 5, 6)), "even parts, each split by itself"
