"""Settings become one mechanism that the whole run can afford, or are refused with the fix."""

import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from fedsim.accountant import (
    EpochShuffled,
    FixedSizeSampled,
    Gaussian,
    JointGaussian,
    PoissonSampled,
    PrivacyLedger,
    RandomAllocation,
    calibrate_noise_multiplier,
)
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.accountant.search import NOISE_TOLERANCE
from fedsim.clients.clipping.adaptive import AdaptiveClipping
from fedsim.clients.clipping.clipping import AutomaticClipping, FlatClipping, LayerClipping
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import Accounting, PlanRequest, PrivacyPlan, PrivacyPlanError
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.divided_batches import BallsAndBins, ShuffledEpochs
from fedsim.clients.sampling.sampling import FixedSizeSampling
from fedsim.clients.sampling.schemes import FIXED_SIZE, SHUFFLE

LOCAL = LocalSettings(steps=5, batch_size=32)


def privacy(**changes: Any) -> PrivacySettings:
    given = {"noise_multiplier": 1.1, "delta": 1e-3, "max_grad_norm": 0.5, **changes}
    if "target_epsilon" in changes:
        del given["noise_multiplier"]
    return PrivacySettings(**given)


def plan(examples: int = 300, rounds: int = 4, **changes: Any) -> PrivacyPlan:
    return plan_privacy(
        PlanRequest(privacy(**changes), LOCAL, examples=examples, planned_rounds=rounds)
    )


def parameters() -> FlatParameters:
    return FlatParameters(nn.Sequential(nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 2)))


def test_the_default_is_poisson_sampling_and_flat_clipping() -> None:
    found = plan()
    assert found.release_as(DpSgdMechanism).event == PoissonSampled(32 / 300, Gaussian(1.1))
    assert found.release_as(DpSgdMechanism).clipping == FlatClipping(0.5)
    assert (found.release_as(DpSgdMechanism).expected_batch, found.planned_steps) == (32.0, 20)
    assert (found.examples, found.delta, found.target_epsilon) == (300, 1e-3, None)
    assert not found.secure_noise
    assert plan(noise="secure").secure_noise


def test_a_client_smaller_than_the_batch_is_sampled_whole() -> None:
    found = plan(examples=20)
    assert found.release_as(DpSgdMechanism).event == PoissonSampled(1.0, Gaussian(1.1))
    assert found.release_as(DpSgdMechanism).expected_batch == 20.0


def test_private_sizes_are_not_looked_at() -> None:
    known: dict[str, Any] = {"adjacency": {"name": "add_remove", "declared_examples": 250}}
    assert plan(examples=300, **known) == plan(examples=301, **known)
    assert plan(**known).release_as(DpSgdMechanism).event == PoissonSampled(32 / 250, Gaussian(1.1))
    found = plan(**known, sampling="balls_and_bins")
    assert found.release_as(DpSgdMechanism).event == RandomAllocation(8, Gaussian(1.1))


def test_samplings() -> None:
    fixed = plan(sampling="fixed_size", adjacency="replace_one").release_as(DpSgdMechanism)
    assert fixed.sampling == FixedSizeSampling(300, 32)
    assert fixed.event == FixedSizeSampled(300, 32, Gaussian(1.1))
    assert fixed.expected_batch == 32.0
    shuffled = plan(sampling="shuffle").release_as(DpSgdMechanism)
    assert shuffled.sampling == ShuffledEpochs(10)  # batches of at most 32 out of 300
    assert shuffled.event == EpochShuffled(10, Gaussian(1.1))
    assert shuffled.expected_batch == 30.0
    bins = plan(sampling="balls_and_bins").release_as(DpSgdMechanism)
    assert bins.sampling == BallsAndBins(10)
    assert bins.expected_batch == 30.0


def test_clippings() -> None:
    assert plan(clipping="automatic").release_as(DpSgdMechanism).clipping == AutomaticClipping(0.5)
    assert plan(clipping="per_layer").release_as(DpSgdMechanism).clipping == LayerClipping(0.5)
    by_dimension = plan(
        clipping={"name": "per_layer", "rule": "by_dimension", "noise_allocation": "optimal"}
    ).release_as(DpSgdMechanism)
    assert by_dimension.clipping == LayerClipping(0.5, bounds="by_dimension")
    assert by_dimension.allocation == "optimal"


def test_adaptive_clipping_as_published_or_as_given() -> None:
    found = plan(clipping="adaptive")
    assert found.release_as(DpSgdMechanism).clipping == AdaptiveClipping.flat(0.5, 1.6)
    given = plan(
        clipping={"name": "adaptive", "quantile": 0.9, "learning_rate": 0.1, "count_noise": 3.0}
    )
    assert given.release_as(DpSgdMechanism).clipping == AdaptiveClipping.flat(0.5, 3.0, 0.9, 0.1)


def test_a_batch_too_small_to_count_is_refused_with_the_fix() -> None:
    with pytest.raises(PrivacyPlanError, match=r"privacy.clipping cannot .* use larger batches"):
        plan(clipping={"name": "adaptive", "count_noise": 0.55})


def test_the_ledger_tells_layers_apart_where_the_model_is_known() -> None:
    found = plan_privacy(
        PlanRequest(
            privacy(clipping="per_layer"),
            LOCAL,
            examples=320,
            planned_rounds=1,
            parameters=parameters(),
        )
    )
    event = found.release_as(DpSgdMechanism).event
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, JointGaussian)
    assert event.event.noise_multipliers == pytest.approx([1.1 * math.sqrt(2)] * 2, rel=1e-3)
    assert 1.1 * (1 - 1e-3) < event.event.noise_multiplier < 1.1
    flat = plan_privacy(
        PlanRequest(privacy(), LOCAL, examples=320, planned_rounds=1, parameters=parameters())
    )
    event = flat.release_as(DpSgdMechanism).event
    assert isinstance(event, PoissonSampled)
    assert isinstance(event.event, Gaussian)
    assert 1.1 * (1 - 1e-3) < event.event.noise_multiplier < 1.1
    assert flat.release.noise_multiplier == 1.1


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"adjacency": "replace_one"},
    {"adjacency": {"name": "add_remove", "declared_examples": 300}},
    {"sampling": "fixed_size", "adjacency": "replace_one"},
    {"sampling": "shuffle"},
    {"sampling": "shuffle", "adjacency": "replace_one"},
    {"sampling": "balls_and_bins"},
    {"sampling": "balls_and_bins", "adjacency": "replace_one"},
    {"sampling": "balls_and_bins", "adjacency": {"name": "add_remove", "declared_examples": 300}},
    {"clipping": {"name": "per_layer", "noise_allocation": "optimal"}},
    {"clipping": "adaptive"},
]


@pytest.mark.parametrize(
    ("settings", "accountant"),
    [
        *((settings, "pld") for settings in SAMPLINGS),
        ({"sampling": "shuffle"}, "rdp"),
        ({"sampling": "balls_and_bins", "noise": "secure"}, "rdp"),
        ({}, "moments"),
    ],
)
def test_the_planned_run_spends_the_target_and_no_more(
    settings: dict[str, Any], accountant: Any
) -> None:
    """Charged round by round, as the clients charge it."""
    given = privacy(**settings, target_epsilon=3.0, accountant=accountant)
    found = plan_privacy(
        PlanRequest(given, LOCAL, examples=300, planned_rounds=7, parameters=parameters())
    )
    ledger = PrivacyLedger()
    for number in range(7):
        for event, count in found.release.charges(5 * number, 5):
            ledger.record(event, count)
    spent = ledger.epsilon(found.delta, given.accounting, given.adjacency.name)
    assert 3.0 - 2 * NOISE_TOLERANCE <= spent <= 3.0


def test_poisson_noise_is_the_calibrated_one() -> None:
    epsilon, delta = target_without_slack(3.0, 1e-3)
    assert plan(target_epsilon=3.0).release_as(
        DpSgdMechanism
    ).noise_multiplier == calibrate_noise_multiplier(
        target_epsilon=epsilon, delta=delta, sampling_rate=32 / 300, steps=20
    )


def test_replacing_needs_more_noise_than_zeroing_out() -> None:
    noise = {
        adjacency: plan(target_epsilon=3.0, adjacency=adjacency)
        .release_as(DpSgdMechanism)
        .noise_multiplier
        for adjacency in ("zero_out", "replace_one")
    }
    assert noise["zero_out"] < noise["replace_one"] < 2.1 * noise["zero_out"]


def test_shuffling_costs_what_it_costs_without_amplification() -> None:
    """Two epochs begin in 20 steps of 10 batches each: two Gaussians, whatever the batches."""
    shuffled = plan(sampling="shuffle", target_epsilon=3.0)
    alone = calibrate_noise_multiplier(target_epsilon=3.0, delta=1e-3, sampling_rate=1.0, steps=2)
    assert shuffled.release.noise_multiplier == pytest.approx(alone, rel=1e-3)
    assert (
        shuffled.release.noise_multiplier > 1.5 * plan(target_epsilon=3.0).release.noise_multiplier
    )


def test_secret_batches_pay_for_a_new_epoch_in_each_round() -> None:
    """4 rounds of 5 steps in epochs of 10 batches: 2 epochs that continue, or 4 that end early."""
    seeded, secret = (
        plan(sampling="balls_and_bins", noise=noise) for noise in ("seeded", "secure")
    )
    assert sum(count for _, count in seeded.release.charges(0, 20)) == 2
    assert sum(count for _, count in secret.release.charges(0, 20)) == 4


def test_a_budget_under_secret_batches_affords_whole_epochs() -> None:
    """What is affordable is charged round by round, and one more step is one epoch too many."""
    given = privacy(sampling="balls_and_bins", noise="secure", accountant="rdp")
    given = given.model_copy(update={"target_epsilon": 2.0})
    found = plan_privacy(PlanRequest(given, LOCAL, examples=300, planned_rounds=60))
    assert found.affordable_steps is not None
    assert 0 < found.affordable_steps < 300
    assert found.affordable_steps % 5 == 0
    ledger = PrivacyLedger()
    for first in range(0, found.affordable_steps + 1, 5):
        spent = ledger.epsilon(found.delta, "rdp", "zero_out") if first else 0.0
        assert spent <= 2.0
        for event, count in found.release.charges(first, 5):
            ledger.record(event, count)
    assert ledger.epsilon(found.delta, "rdp", "zero_out") > 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling": "fixed_size"},
            "fixed_size has no guarantee under adjacency zero_out, .* set adjacency: "
            "replace_one, or sampling: poisson or shuffle or balls_and_bins",
        ),
        (
            {"sampling": "fixed_size", "adjacency": {"name": "add_remove", "declared_examples": 9}},
            "set adjacency: replace_one, or sampling: poisson",
        ),
        (
            {"sampling": "shuffle", "adjacency": {"name": "add_remove", "declared_examples": 9}},
            "shuffle has no guarantee under adjacency add_remove, .* set adjacency: zero_out or "
            "replace_one, or sampling: poisson or balls_and_bins",
        ),
    ],
)
def test_settings_without_a_guarantee_are_refused_with_the_fix(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        privacy(**changes)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_target_beyond_what_is_proven_is_met_by_a_smaller_epsilon(sampling: str) -> None:
    found = plan(sampling=sampling, target_epsilon=1e9)
    assert 70 < Accounting(1e-3).epsilon(found.charges(0, found.planned_steps)) < 100


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_target_without_a_noise_is_refused(sampling: str) -> None:
    with pytest.raises(PrivacyPlanError, match="cannot be met over 20 steps: even with"):
        plan(sampling=sampling, target_epsilon=1e-5)


def test_a_pair_that_the_accountant_cannot_add_up_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings refuse what is known; the plan asks the accountant before anything is spent."""
    settings = privacy(sampling="shuffle")
    monkeypatch.setattr(ShuffledEpochs, "event", BallsAndBins.event)
    monkeypatch.setattr(ShuffledEpochs, "scheme", replace(SHUFFLE, adjacencies=("add_remove",)))
    with pytest.raises(PrivacyPlanError, match="set adjacency: add_remove, or sampling: poisson"):
        plan_privacy(PlanRequest(settings, LOCAL, examples=300, planned_rounds=1))
    monkeypatch.setattr(FixedSizeSampling, "scheme", replace(FIXED_SIZE, adjacencies=("zero_out",)))
    unproved = settings.with_choice("sampling", name="fixed_size")
    with pytest.raises(PrivacyPlanError, match="cannot account for sampling fixed_size under"):
        plan_privacy(PlanRequest(unproved, LOCAL, examples=300, planned_rounds=1))
