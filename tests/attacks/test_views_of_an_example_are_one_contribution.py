"""K views of an example are one contribution of at most C, and change nobody else's.

The attacker wants an example with many views to count more than once, to reach into the rows of
other examples, or to be charged less than it is worth.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.clients.clipping.clipping import FlatClipping
from fedsim.clients.gradients import per_example
from fedsim.clients.gradients.choice import gradients_for
from fedsim.clients.local_settings import LocalSettings, SgdSettings, ViewSettings
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.model_checks.bit_isolation import RowIsolation
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.models.losses import cross_entropy
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.tools.replay import replay_run

AUGMENT = [ViewSettings(shift=1), ViewSettings(noise=0.2)]
LOCAL = LocalSettings(
    steps=1, batch_size=12, optimizer=SgdSettings(name="sgd", lr=1.0), augmentation_multiplicity=3
).model_copy(update={"augmentations": AUGMENT})
BOUND, N = 0.5, 12


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.randn(N, 1, 6, 6, generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def update(x: Tensor, y: Tensor, *, local: LocalSettings = LOCAL) -> Tensor:
    """The sum of all clipped contributions in a step with all examples and no noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    gradients = gradients_for(model, cross_entropy, *data(9))
    shared = SharedModel(model, parameters=gradients.parameters)
    step = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(BOUND), 0.0, N, largest_batch=N)
    member = BlockMember(x, y, StreamKey(3, 0, 1), range(1), step)
    result = block_of(shared, cross_entropy, gradients, local, [member]).train()
    return N * (shared.start_values - result.values[0]).double()


def test_an_example_moves_the_release_by_its_bound_at_most() -> None:
    x, y = data()
    whole = update(x, y)
    for i in (0, 7):
        for value in (torch.zeros_like(x[0]), 1e3 * x[i], -1e30 * torch.ones_like(x[0])):
            other = x.clone()
            other[i] = value
            distance = (update(other, y) - whole).norm().item()
            assert distance <= 2 * BOUND * (1 + 1e-4), "replaced: one out, one in"
    without = x.clone()
    without[5] = torch.nan  # an example without a gradient adds nothing
    distance = (update(without, y) - whole).norm().item()
    assert 0.3 * BOUND < distance <= BOUND * (1 + 1e-4)


def test_an_example_changes_its_own_contribution_alone() -> None:
    """The bits of one example's part, while the other rows of its padded batch change."""
    gradients = gradients_for(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)),
        cross_entropy,
        *data(9),
    )
    for views in (1, 3, 4):
        RowIsolation(gradients, *data(9), views=views).check(2, 8)


def test_a_pass_that_mixes_the_views_of_two_examples_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_example = per_example.by_example

    def mixed(found: Any, views: int) -> Any:
        """Take the last view of an example for the first of the next one."""
        for use in {id(use): use for use in found.values()}.values():
            use.output_gradient = use.output_gradient.roll(1, 0)
            if use.needs_input:
                use.input = use.input.roll(1, 0)
        return by_example(found, views)

    monkeypatch.setattr(per_example, "by_example", mixed)
    gradients = gradients_for(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), cross_entropy, *data(9)
    )
    with pytest.raises(UnsafeModelError, match="one example may change the contributions of all"):
        RowIsolation(gradients, *data(9), views=3).check(1, 8)


def experiment(**local: Any) -> dict[str, Any]:
    return {
        "name": "views",
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": 3, "min_examples": 30},
        },
        "model": {"name": "logistic"},
        "federation": {"rounds": 2},
        "local": {
            **{"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
            **local,
        },
        "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }


VIEWS = {"augmentation_multiplicity": 3, "augmentations": [{"shift": 1}, "flip", {"noise": 0.1}]}


def test_the_charge_is_that_of_one_view_and_the_run_can_be_replayed(tmp_path: Path) -> None:
    plain = run_experiment(experiment(), out=tmp_path / "plain")
    viewed = run_experiment(experiment(**VIEWS), out=tmp_path / "viewed")
    assert plain.privacy is not None
    assert viewed.privacy is not None
    for one, other in zip(plain.privacy.clients, viewed.privacy.clients, strict=True):
        assert one.ledger.to_list() == other.ledger.to_list()
        assert (one.epsilon, one.noise_multiplier) == (other.epsilon, other.noise_multiplier)
    names = [path / "model.safetensors" for path in (plain.path, viewed.path)]
    assert names[0].read_bytes() != names[1].read_bytes()
    assert replay_run(RunDirectory.open(viewed.path)).problems == ()


@pytest.mark.usefixtures("whole_probe")
def test_a_sum_over_views_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each view clipped by itself, and added: K times the bound."""
    federation = assemble(load_experiment(experiment(augmentation_multiplicity=3)), ledger=None)
    gradients = federation.model.gradients
    assert gradients is not None
    right = type(gradients).clipped

    def each_view(self: Any, values: Any, padded: Any, clip: Any) -> Any:
        wide = replace(
            clip,
            bounds=clip.bounds.repeat_interleave(padded.views, 0),
            scales=clip.scales.repeat_interleave(padded.views, 0),
        )
        return right(self, values, replace(padded, views=1), wide)

    probe_mechanisms(federation)
    monkeypatch.setattr(type(gradients), "clipped", each_view)
    with pytest.raises(MechanismMismatchError, match="clipping bound"):
        probe_mechanisms(federation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.features": ["unit_norm"]}, "model.features transforms each example once"),
        ({"local.augmentations": ["mirror"]}, r"must be flip, \{shift: 1\} or \{noise: 0.1\}"),
        ({"local.augmentations": [{"shift": 1, "noise": 0.1}]}, "got shift and noise"),
        ({"local.augmentations": []}, "local.augmentations"),
        ({"local.augmentation_multiplicity": 0}, "local.augmentation_multiplicity"),
    ],
)
def test_impossible_views_are_reported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load_experiment(experiment(**VIEWS), changes)


def test_nothing_of_a_seed_is_shared_with_other_streams() -> None:
    federation = assemble(load_experiment(experiment(**VIEWS)), ledger=None)
    key = StreamKey(federation.experiment.seed, 1, 1)
    views = key.views(federation.experiment.local)
    assert views is not None
    assert views.number == 3
    assert key.views(LocalSettings(steps=1, batch_size=1)) is None
    x = torch.zeros(4, 1, 8, 8)
    assert views.draw(x, np.arange(4), 0).shape == (12, 1, 8, 8)
