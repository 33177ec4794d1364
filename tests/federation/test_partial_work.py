"""The planned steps of clients whose rounds are whole, partial, or one release each."""

from itertools import accumulate

import pytest

from fedsim.federation.schedule import StepSchedule
from fedsim.server.participation.participation import Participation
from fedsim.server.settings import FederationSettings

WHOLE = (6, 4, 9)


def schedule(share: float | None, *, unit: str = "example") -> StepSchedule:
    partial = None if share is None else {"share": share}
    settings = {"rounds": 8, "clients_per_round": 2, "partial_work": partial}
    federation = FederationSettings.model_validate(settings)
    participation = Participation.of(federation, num_clients=3, seed=5)
    return StepSchedule(participation, WHOLE, releases_updates=unit == "client")


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
@pytest.mark.parametrize("unit", ["example", "client"])
def test_counts_of_steps_and_rounds_agree(share: float | None, unit: str) -> None:
    steps = schedule(share, unit=unit)
    for client in range(3):
        rounds = steps.participation.rounds_of(client)
        each = [steps.charged_steps(client, number) for number in rounds]
        taken = list(accumulate(each, initial=0))
        assert [steps.steps_after(client, n) for n in range(len(taken))] == taken
        assert steps.planned()[client] == taken[-1]
        beyond = 1 if unit == "client" else WHOLE[client]
        taken += [taken[-1] + beyond, taken[-1] + 2 * beyond]
        assert steps.steps_after(client, len(rounds) + 2) == taken[-1]
        for count in range(taken[-1]):
            assert steps.whole_rounds_in(client, count) == sum(t <= count for t in taken) - 1
            assert steps.rounds_in(client, count) == sum(t < count for t in taken)


def test_stragglers_take_fewer_steps_and_others_all() -> None:
    steps = schedule(0.5)
    for number in range(1, 9):
        slow = steps.participation.stragglers_in(number)
        assert len(slow) == 1
        for client in steps.participation.in_round(number):
            taken = steps.local_steps(client, number)
            assert (1 <= taken < WHOLE[client]) if client in slow else taken == WHOLE[client]
