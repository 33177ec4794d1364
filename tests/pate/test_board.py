"""Which queries a ballot asks: a public function that no shares make ask more than is charged."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsim.clients.mechanisms.votes.ballots import Ballot, Ballots
from fedsim.pate.public_answers import NOT_CHECKED, Agenda

AGENDA = Agenda(Ballots(Ballot(6, 3.0), Ballot(2, 1.0)), threshold=0.5)


def test_a_check_asks_its_batch() -> None:
    shares = np.full(12, NOT_CHECKED)
    assert AGENDA.asked(1, shares).tolist() == [0, 1, 2, 3, 4, 5]
    assert AGENDA.asked(3, shares).tolist() == [6, 7, 8, 9, 10, 11]


def test_a_vote_asks_the_first_that_passed() -> None:
    shares = np.array([0.4, 0.9, 0.5, 0.7, 0.1, 0.8, *[0.9] * 6])
    assert AGENDA.asked(2, shares).tolist() == [1, 2, -1, -1, -1, -1]
    assert AGENDA.asked(4, shares).tolist() == [6, 7, -1, -1, -1, -1]


def test_a_vote_asks_nothing_after_a_check_that_was_given_up() -> None:
    assert set(AGENDA.asked(2, np.full(12, NOT_CHECKED)).tolist()) == {-1}


@given(
    st.lists(st.floats(allow_nan=True, width=32), min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 4]),
)
def test_no_shares_make_a_ballot_ask_more_than_is_charged(shares: list[float], number: int) -> None:
    asked = AGENDA.asked(number, np.array(shares, dtype=np.float32))
    chosen = asked[asked >= 0]
    assert len(chosen) <= AGENDA.ballots.of_round(number).queries
    assert len(set(chosen.tolist())) == len(chosen)
