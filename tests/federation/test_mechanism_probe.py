"""The probe before round 1 has one driver for all kinds of releases."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedsim.clients.mechanisms import input_perturbation as noisy_input
from fedsim.clients.mechanisms import output_perturbation as output
from fedsim.clients.mechanisms.contract import Mechanism
from fedsim.experiment import load_experiment
from fedsim.federation import mechanism_probe
from fedsim.federation.assembly import assemble
from fedsim.federation.charged_noise import ChargedPart, Release
from fedsim.federation.federation import Federation
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.federation.release_probes import PROBES
from fedsim.noise import release
from fedsim.noise.sources import DEVIATION

pytestmark = pytest.mark.usefixtures("whole_probe")

EXPERIMENT: dict[str, Any] = {
    "name": "probed",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-3, "mechanism": {"max_feature_norm": 4.0}},
}
OUTPUT = {
    "privacy.mechanism.name": "output_perturbation",
    "local.optimizer.lr": 0.05,
    "local.optimizer.weight_decay": 0.01,
}
INPUT = {"privacy.mechanism.name": "input_perturbation"}


def federation(overrides: dict[str, Any]) -> Federation:
    return assemble(load_experiment(EXPERIMENT, overrides), ledger=None, in_process=True)


def kinds(of: type[Mechanism]) -> Iterator[type[Mechanism]]:
    for kind in of.__subclasses__():
        if kind.__module__.startswith("fedsim.") and not kind.__abstractmethods__:
            yield kind
        yield from kinds(kind)


def test_every_mechanism_has_a_probe() -> None:
    found = {one: [*filter(PROBES.get, one.__mro__)] for one in kinds(Mechanism)}
    assert all(found.values()), found
    assert {first for first, *_ in found.values()} == set(PROBES)


@pytest.mark.parametrize("overrides", [OUTPUT, INPUT], ids=["output", "input"])
def test_noise_three_percent_too_small_never_starts(
    overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = federation(overrides)
    probe_mechanisms(whole)
    fill = release.fill_rows_

    def smaller(sources: Any, rows: torch.Tensor) -> None:
        fill(sources, rows)
        rows *= 0.97

    monkeypatch.setattr(release, "fill_rows_", smaller)
    with pytest.raises(MechanismMismatchError, match=r"is 0\.9[67]|noise multiplier is"):
        probe_mechanisms(whole)


@pytest.mark.parametrize(
    ("overrides", "module"), [(OUTPUT, output), (INPUT, noisy_input)], ids=["output", "input"]
)
def test_an_example_above_its_bound_never_starts(
    overrides: dict[str, Any], module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, bounded = federation(overrides), module.bounded_rows
    factor = 100.0 if module is output else 1.03  # one example moves a model less than is charged
    monkeypatch.setattr(module, "bounded_rows", lambda x, norm: bounded(x, factor * norm))
    with pytest.raises(MechanismMismatchError, match="an example contributes"):
        probe_mechanisms(whole)


def test_a_client_of_two_blocks_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise would be counted twice, and found to repeat."""
    monkeypatch.setattr(mechanism_probe, "_blocks_to_probe", lambda *_: [(0, 1), (1, 2), (0, 2)])
    whole = federation(OUTPUT)
    probed = [tuple(one.clients) for one in mechanism_probe._probes(whole)]
    assert probed == [(0, 1), (2,)]
    probe_mechanisms(whole)


def test_a_contribution_is_the_largest_of_a_row_in_bounds() -> None:
    silent = torch.tensor([[1.0, 2.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0]]).double()
    moved = torch.tensor([[0.0, 0.0, 0.0, 0.0, 8.0], [3.0, 7.0, 0.0, 4.0, 1.0]]).double()
    outer = ChargedPart(2.0, 0.1, [slice(0, 1), slice(3, 5)])
    inner = ChargedPart(1.0, 1.0, [slice(1, 3)])
    large = Release(0, silent + moved, [outer, inner], reach=2.0)
    found = [*large.contributions(Release(0, silent, [outer, inner]))]
    assert [norm for norm, _ in found] == pytest.approx([0.4, 3.5])
    assert found[0][1] == pytest.approx(math.sqrt(3) * 2.0 / DEVIATION / 2.0)


def test_noise_is_in_charged_deviations_and_without_its_offset() -> None:
    values, part = torch.tensor([[1.0, 5.0], [4.0, 5.0]]), ChargedPart(3.0, 0.5, [slice(0, 1)])
    noise = Release(0, values, [part], offset=torch.tensor([1.0, 5.0])).noise
    assert part.squares(noise) == (pytest.approx((3.0 * 0.5 / 3.0) ** 2), 2)
    assert part.start(noise, 1).tolist() == [0.0]
    assert part.start(noise, 9).tolist() == [0.0, 0.5]
