"""The `info` of a secret differs if any field of its context differs."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fedsim.secagg.context import RoundContext, pack, set_digest

CONTEXT = RoundContext(
    run_id="run",
    round_nonce=bytes(16),
    server_round=1,
    layout="l",
    params="p",
    model="m",
    asked="a",
    plan="q",
)
KEYS = {"purpose": "a", "sender": 1, "receiver": 2}


def test_every_field_is_bound() -> None:
    others = [
        replace(CONTEXT, run_id="run2").info(**KEYS),
        replace(CONTEXT, round_nonce=b"1" * 16).info(**KEYS),
        replace(CONTEXT, server_round=2).info(**KEYS),
        replace(CONTEXT, layout="x").info(**KEYS),
        replace(CONTEXT, params="x").info(**KEYS),
        replace(CONTEXT, model="x").info(**KEYS),
        replace(CONTEXT, asked="x").info(**KEYS),
        replace(CONTEXT, plan="x").info(**KEYS),
        *(CONTEXT.info(**{**KEYS, name: 9 if name != "purpose" else "b"}) for name in KEYS),
        CONTEXT.info(purpose="a", sender=2, receiver=1),
        replace(CONTEXT, layout="lp", params="").info(**KEYS),  # fields must not run together
    ]
    assert len({CONTEXT.info(**KEYS), *others}) == len(others) + 1


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_packing_is_injective(one: list[bytes], other: list[bytes]) -> None:
    assert (pack(one) == pack(other)) == (one == other)


def test_a_set_has_no_order() -> None:
    assert set_digest([3, 1, 2]) == set_digest([1, 2, 3]) != set_digest([1, 23])
