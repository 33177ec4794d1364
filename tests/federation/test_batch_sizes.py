"""`local.batch_size: full`, and the note on sampling rates that are far apart."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES, SamplingName
from fedsim.clients.training.member import StreamKey
from fedsim.clients.training.plain import batches_of
from fedsim.experiment import ExperimentError, dump_experiment, load_experiment
from fedsim.federation.assembly import assemble, full_batch_note
from fedsim.planning.projection import plan_experiment

KEY = StreamKey(seed=1, client=2, round_number=3)
EXPERIMENT: dict[str, Any] = {
    "name": "full",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "quantity", "num_clients": 3, "min_examples": 20},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 1, "batch_size": "full"},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


def planned(examples: int, local: LocalSettings, **privacy: Any) -> PrivacyPlan:
    settings = PrivacySettings(noise_multiplier=1.0, delta=1e-3, max_grad_norm=1.0, **privacy)
    return plan_privacy(PlanRequest(settings, local, examples=examples, planned_rounds=4))


@pytest.mark.parametrize("sampling", sorted(SAMPLING_SCHEMES))
def test_a_full_batch_is_all_examples_whatever_the_sampling(sampling: SamplingName) -> None:
    local = LocalSettings(steps=2, batch_size="full")
    step = planned(37, local, sampling=sampling, adjacency="replace_one").release_as(DpSgdMechanism)
    assert (step.sampling.sampling_rate, step.expected_batch) == (1.0, 37.0)
    batches = KEY.draw_batches(step.sampling, 37, first_step=5)
    for _ in range(3):
        assert np.array_equal(next(batches), np.arange(37)), "no shuffle"
    one_release = PldAccountant(adjacency="replace_one")
    one_release.compose(Gaussian(1.0))
    charged = PldAccountant(adjacency="replace_one")
    for event, count in step.charges(0, 1):
        charged.compose(event, count)
    assert charged.get_epsilon(delta=1e-3) == pytest.approx(one_release.get_epsilon(delta=1e-3))


def test_a_full_batch_of_a_private_size_has_a_public_normaliser() -> None:
    """Under add_remove rate, normaliser and event are those of the declared size."""
    local = LocalSettings(steps=1, batch_size="full")
    plans = [
        planned(size, local, adjacency={"name": "add_remove", "declared_examples": 50})
        for size in (0, 40, 90)
    ]
    assert {repr(plan) for plan in plans} == {repr(plans[0])}
    assert plans[0].release_as(DpSgdMechanism).expected_batch == 50.0
    assert plans[0].release_as(DpSgdMechanism).event == PoissonSampled(1.0, Gaussian(1.0))
    assert (
        len(next(KEY.draw_batches(plans[0].release_as(DpSgdMechanism).sampling, 90, first_step=0)))
        == 90
    )


def test_full_batches_without_privacy_are_all_examples_in_order() -> None:
    batches = batches_of(LocalSettings(steps=1, batch_size="full"), 11, KEY)
    assert np.array_equal(next(batches), np.arange(11))
    assert np.array_equal(next(batches), np.arange(11))


def test_full_is_the_largest_batch_size_of_equal_clients() -> None:
    """The same bits as with the number, in padded batches and in blocks."""
    iid = {"data.partition": {"scheme": "iid", "num_clients": 3}, "data.test_fraction": 0.2}
    models = []
    for batch in ("full", 480):
        loaded = load_experiment(EXPERIMENT, {**iid, "local.batch_size": batch})
        federation = assemble(loaded, ledger=None)
        plans = federation.plan.clients or ()
        models.append(
            [
                (
                    p.release_as(DpSgdMechanism).sampling.sampling_rate,
                    p.release.noise_multiplier,
                )
                for p in plans
            ]
        )
        assert federation.blocks.rows([0, 1, 2]) == 480
    assert models[0] == models[1]


def test_every_client_has_a_rate_of_one_and_the_same_noise() -> None:
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    sizes = federation.data.clients.sizes
    assert max(sizes) > 2 * min(sizes)
    steps = [plan.release_as(DpSgdMechanism) for plan in federation.plan.clients or ()]
    assert {step.sampling.sampling_rate for step in steps} == {1.0}
    assert [step.expected_batch for step in steps] == [float(size) for size in sizes]
    noise = [step.noise_multiplier for step in steps]
    assert max(noise) < 1.002 * min(noise)  # the rounding of larger sums takes more
    first, second = (federation.client_task(0).data.tensors() for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_full_is_dumped_and_read_back() -> None:
    experiment = load_experiment(EXPERIMENT).experiment
    assert "batch_size: full" in dump_experiment(experiment)


def test_full_beside_a_sampling_rate_is_refused_by_both_names() -> None:
    with pytest.raises(ExperimentError, match=r"local\.batch_size: full is a sampling rate of 1"):
        load_experiment(EXPERIMENT, {"privacy.sampling.rate": 0.5})


def test_another_word_is_refused_with_the_one_that_works() -> None:
    with pytest.raises(ExperimentError, match=r"must be a number or .full., got .ful."):
        load_experiment(EXPERIMENT, {"local.batch_size": "ful"})


def test_a_plan_of_full_batches_compares_half_the_batch() -> None:
    plan = plan_experiment(load_experiment(EXPERIMENT))
    changes = [one.change for one in plan.variations]
    assert "half the batch: a number for local.batch_size, sampling.rate=0.5" in changes
    assert not any("double the batch" in change for change in changes)
    assert plan.note is None


def test_a_fixed_batch_far_above_the_usual_rate_is_noted() -> None:
    experiment = load_experiment(EXPERIMENT, {"local.batch_size": 20}).experiment
    note = full_batch_note(experiment, [40, 400, 400])
    assert note is not None
    assert "a sampling rate of 0.5 for the smallest client (40 examples) and 0.05" in note
    assert "privacy.sampling.rate=0.05 gives every client the same rate" in note
    assert full_batch_note(experiment, [200, 400, 400]) is None
    rate = load_experiment(
        EXPERIMENT, {"local.batch_size": 20, "privacy.sampling.rate": 0.05}
    ).experiment
    assert full_batch_note(rate, [40, 400, 400]) is None
