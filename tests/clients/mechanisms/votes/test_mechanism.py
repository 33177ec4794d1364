"""The release of votes: sensitivity, charges and noise of a ballot."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.accountant import Gaussian, PrivacyLedger
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.kinds import KINDS
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan, PrivacyPlanError
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.mechanisms.votes.ballots import Ballot, Ballots
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL, VoteMechanism, release_votes
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.noise.release import NoiseRangeError
from fedsim.noise.sources import DEVIATION, NoNoise, SeededNoise

BALLOTS = Ballots(Ballot(30, 12.0), Ballot(10, 5.0))
CLASSES = 4


def values(size: int, dtype: torch.dtype) -> FlatParameters:
    """Return parameters of so many values."""
    return FlatParameters(nn.Linear(size, 1, bias=False, dtype=dtype))


def released(labels: list[int], mechanism: VoteMechanism, number: int) -> np.ndarray:
    votes = release_votes(
        np.array(labels), CLASSES, vote=mechanism.vote_steps(number), noise=NoNoise()
    )
    return votes.reshape(len(labels), CLASSES)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("noise", [0.37, 1.0, 23.0])
def test_no_other_teacher_moves_a_query_by_more_than_is_charged(noise: float, number: int) -> None:
    mechanism = VoteMechanism(1.0, noise, ballots=BALLOTS)
    [(event, count)] = mechanism.of_round(number).charges(0, 1)
    assert isinstance(event, Gaussian)
    sigma = BALLOTS.of_round(number).deviation
    assert event.noise_multiplier == pytest.approx(noise * sigma / math.sqrt(2.0), rel=1e-15)
    assert count == BALLOTS.of_round(number).queries
    rows = [released([label], mechanism, number) for label in (*range(CLASSES), NO_LABEL)]
    moved = max(float(np.linalg.norm(one - other)) for one in rows for other in rows)
    assert moved * event.noise_multiplier <= DEVIATION
    assert moved * event.noise_multiplier >= DEVIATION * (1 - 1e-5)  # and no noise is wasted


def test_a_round_is_charged_as_its_own_ballot_whatever_was_missed() -> None:
    mechanism = VoteMechanism(1.0, 1.0, ballots=BALLOTS)
    first, second = (mechanism.of_round(number).charges(0, 1) for number in (1, 2))
    assert mechanism.of_round(2).charges(7, 1) == second != first
    assert mechanism.charges(0, 2) == [*first, *second]
    assert mechanism.charges(1, 3) == [(second[0][0], 20), (first[0][0], 30)]
    assert mechanism.charges(0, 4, noise_factor=2.0)[0][0] == Gaussian(24.0 / math.sqrt(2.0))


def test_the_noise_of_a_count_is_the_one_charged() -> None:
    labels = np.full(4000, NO_LABEL)
    labels[:10] = 1
    vote = VoteMechanism(1.0, 2.0, ballots=BALLOTS).vote_steps(1)
    votes = release_votes(labels, CLASSES, vote=vote, noise=SeededNoise(bytes(32)))
    assert np.array_equal(votes, np.rint(votes))
    deviation = float(votes[40:].std()) / vote
    assert deviation == pytest.approx(24.0, rel=0.03)
    again = release_votes(labels, CLASSES, vote=vote, noise=SeededNoise(bytes(32)))
    assert np.array_equal(votes, again)


def planned(
    privacy: PrivacySettings, rounds: int, counts: FlatParameters | None = None
) -> PrivacyPlan:
    local = LocalSettings(steps=1, batch_size=1)
    return plan_privacy(
        PlanRequest(
            privacy,
            local,
            examples=9,
            planned_rounds=rounds,
            parameters=counts,
            problem=BALLOTS,
            kind=KINDS["votes"],
        )
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrated_noise_spends_the_target(accountant: str) -> None:
    privacy = PrivacySettings.model_validate(
        {"unit": "client", "target_epsilon": 3.0, "delta": 1e-3, "accountant": accountant}
    )
    counts = FlatParameters(nn.Linear(120, 1, bias=False))
    plan = planned(privacy, 4, counts)
    ledger = PrivacyLedger()
    for event, count in plan.charges(0, 4):
        ledger.record(event, count)
    epsilon = ledger.epsilon_with_slack(1e-3, privacy.accounting, "zero_out")
    assert 2.99 < epsilon <= 3.0
    assert plan.affordable_steps == plan.planned_steps == 4


def test_votes_without_noise_are_no_private_plan() -> None:
    privacy = PrivacySettings(unit="client", noise_multiplier=0.0, delta=1e-3)
    with pytest.raises(PrivacyPlanError, match="privacy: null"):
        planned(privacy, 2)


@pytest.mark.parametrize("noise", [1e-7, 1e6])
def test_noise_outside_the_grid_is_refused(noise: float) -> None:
    with pytest.raises(NoiseRangeError, match="votes, and the grid takes"):
        VoteMechanism(1.0, noise, ballots=BALLOTS).for_model(values(120, torch.float64))
