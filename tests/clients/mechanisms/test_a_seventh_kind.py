"""A kind of private release that the kernel has never heard of: Laplace noise, with pure ε.

The test registers it in place of Gaussian noise on whole updates. An experiment file with `unit:
client` is then planned, probed, trained, charged, stated, verified and replayed as this kind. So
the file list of CONTRIBUTING.md is complete: a folder, and facts in the registry.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.accountant import EpsilonDelta, Event
from fedsim.accountant.sampler_slack import target_without_slack
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.contract import ReleasedUpdates, UpdateRelease
from fedsim.clients.mechanisms.kinds import KINDS, ReleaseKind
from fedsim.clients.mechanisms.plan import Draft, PlanRequest, delta_of
from fedsim.clients.sampling.sampling import Charges
from fedsim.core.streams import Keystream
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.noise.sources import NoiseSource, SeededNoise
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run
from fedsim.statement import SENTENCES
from fedsim.statement.mechanism import row_of
from fedsim.tools.replay import replay_run

ROUNDS, TARGET, DELTA = 2, 10.0, 1e-3
EXPERIMENT: dict[str, Any] = {
    "name": "seventh",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "logistic"},
    "federation": {"rounds": ROUNDS},
    "local": {"steps": 2, "batch_size": 8},
    "privacy": {
        "unit": "client",
        "target_epsilon": TARGET,
        "delta": DELTA,
        "max_update_norm": 0.5,
    },
}
BITS = 30
SCALE = 2.0**BITS  # of the noise, in steps of the grid
LAPLACE = ReleaseKind(
    name="laplace_update",
    unit="client",
    releases="whole updates of clients with Laplace noise",
    bound="max_update_norm",
    local_trust_only=True,
    events=frozenset({"EpsilonDelta"}),
    sensitivity_of="a clipped update",
    sensitivity="S",
    charged="every release of an update",
    title="One release of a whole update in a round, with Laplace noise",
    statement="A client clips its whole update to L1 norm S and adds Laplace noise of standard "
    "deviation z · S to every value. Here z = {z}, S = {bound}, {rounds}.",
)


@dataclass(frozen=True)
class LaplaceUpdate(UpdateRelease):
    """An update of an L1 norm of at most S, on a grid, with discrete Laplace noise.

    Guarantee: pure ε under zero-out, which moves the integers by at most ε 2³⁰ + d / 2 steps, of
    which each changes probabilities by a factor of exp(2⁻³⁰). All that float64 rounds is below
    2⁻⁴⁰ ε + d 2⁻⁴⁴.
    """

    max_update_norm: float
    noise_multiplier: float  # √2 / ε, the standard deviation over S
    dimensions: int = 0

    @property
    def mechanism(self) -> Event:
        epsilon = math.sqrt(2.0) / self.noise_multiplier
        rounding = self.dimensions * (2.0**-31 + 2.0**-44)
        return EpsilonDelta(epsilon * (1.0 + 2.0**-40) + rounding, 0.0)

    @property
    def effective_noise_multiplier(self) -> float:
        return math.sqrt(2.0) / cast(EpsilonDelta, self.mechanism).epsilon

    @property
    def charged_multipliers(self) -> tuple[float, ...]:
        return (self.effective_noise_multiplier,)

    def normal_scores(self, noise: Tensor) -> Tensor:
        tail = 0.5 * torch.exp(-math.sqrt(2.0) * noise.abs())
        return torch.special.ndtri(tail).abs().copysign(noise)

    @property
    def update_step(self) -> float:
        return self.noise_multiplier * self.max_update_norm / math.sqrt(2.0) / SCALE

    def charges(self, first_step: int, steps: int, *, noise_factor: float = 1.0) -> Charges:
        assert noise_factor == 1.0
        return [(self.mechanism, steps)] if steps else []

    def for_model(self, parameters: FlatParameters) -> Self:
        return replace(self, dimensions=parameters.size)

    @staticmethod
    def release_updates(
        trained: Tensor,
        starts: Tensor,
        mechanisms: Sequence["LaplaceUpdate"],
        noises: Sequence[NoiseSource],
        has_data: Sequence[bool],
    ) -> ReleasedUpdates:
        rows = trained.double() - starts.double()
        for row, noise, one in zip(rows, noises, mechanisms, strict=True):
            row.mul_(clip_factor(row, one.max_update_norm) / one.update_step).round_()
            row.add_(torch.from_numpy(laplace(noise, len(row))))
        return ReleasedUpdates(rows, [None] * len(rows))


def clip_factor(row: Tensor, bound: float) -> float:
    """The factor that brings a finite update within an L1 norm."""
    norm = float(row.abs().sum())
    assert math.isfinite(norm)
    return 1.0 if norm <= bound else bound / norm


def laplace(noise: NoiseSource, size: int) -> np.ndarray:
    """Discrete Laplace noise of scale 2³⁰ (size,): the difference of two geometric numbers."""
    assert isinstance(noise, SeededNoise)
    bits, _ = noise.keystreams()
    return geometric(bits, size) - geometric(bits, size)


def geometric(bits: Keystream, size: int) -> np.ndarray:
    """Geometric numbers of ratio exp(−2⁻³⁰): independent digits below 2³⁰, and a geometric rest."""
    found = np.zeros(size)
    for place in range(BITS):
        found += events(bits, 1.0 / (1.0 + math.exp(2.0**place / SCALE)), size) * 2.0**place
    going = np.arange(size)
    while going.size:
        going = going[events(bits, math.exp(-1.0), going.size)]
        found[going] += SCALE
    return found


def events(bits: Keystream, probability: float, size: int) -> np.ndarray:
    """Independent events of a probability, bool (size,)."""
    words = np.empty(size, dtype=np.uint64)
    bits.write(words.data.cast("B"))
    return words < np.uint64(probability * 2.0**64)


def draft(request: PlanRequest) -> Draft:
    """Return the draft of a client, with equal shares of its target ε by basic composition."""
    privacy, rounds, parameters = request.privacy, request.planned_rounds, request.parameters
    target, _ = target_without_slack(privacy.target_epsilon or 0.0, delta_of(privacy, 1))

    def build(noise: float) -> LaplaceUpdate:
        release = LaplaceUpdate(privacy.clip_norm, noise)
        if parameters is None:
            return release
        return release.for_model(parameters).with_effective_noise(noise)

    return Draft(
        examples=0,
        steps=rounds,
        given=math.sqrt(2.0) * rounds / target,
        like=LaplaceUpdate(1.0, 1.0),
        build=build,
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind: its facts, its module with a draft, and the sentence of its words."""
    monkeypatch.setitem(cast(dict[str, ReleaseKind], KINDS), "client_update", LAPLACE)
    module = ModuleType("fedsim.clients.mechanisms.laplace_update")
    vars(module)["draft"] = draft
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sentences = (*SENTENCES, row_of(LAPLACE))
    monkeypatch.setattr("fedsim.statement.SENTENCES", sentences)


def test_a_new_kind_is_planned_trained_charged_stated_verified_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At last: a ledger of half the ε that is planned is found."""
    path = run_experiment(EXPERIMENT, out=tmp_path / "r").path
    privacy = json.loads((path / "privacy.json").read_text())
    assert TARGET - 0.1 < privacy["system_epsilon"] <= TARGET
    for row in privacy["clients"]:
        (entry,) = row["ledger"]
        assert (entry["count"], entry["event"]["type"]) == (ROUNDS, "EpsilonDelta")
        assert entry["event"]["delta"] == 0.0
        assert ROUNDS * entry["event"]["epsilon"] == pytest.approx(TARGET, rel=1e-4)
        assert ROUNDS * entry["event"]["epsilon"] <= TARGET  # basic composition
    points = {point["id"]: point for point in privacy["statement_points"]}
    assert "private for everything that client k has" in privacy["statement"]
    assert points["laplace_update"]["values"]["max_update_norm"] == [0.5, 0.5]
    assert "clips its whole update to L1 norm S" in points["laplace_update"]["text"]
    directory = RunDirectory.open(path)
    assert verify_run(directory).problems == ()
    assert replay_run(directory).problems == ()
    event = LaplaceUpdate.mechanism.fget
    assert event is not None
    monkeypatch.setattr(LaplaceUpdate, "mechanism", property(lambda one: doubled(event(one))))
    problems = verify_run(RunDirectory.open(path)).problems
    assert any("is not the charge that experiment.yaml plans" in one for one in problems)


def doubled(event: Event) -> Event:
    return replace(cast(EpsilonDelta, event), epsilon=2.0 * cast(EpsilonDelta, event).epsilon)


@pytest.mark.usefixtures("whole_probe")
def test_its_probe_finds_less_noise_and_a_larger_update() -> None:
    """And no fault in the right kind: every run is probed."""
    federation = assemble(load_experiment(EXPERIMENT), ledger=None)
    for name, factor, message in (
        ("laplace", 0.95, r"noise multiplier is|of what is charged"),
        ("clip_factor", 40.0, "an example contributes"),
    ):
        right = globals()[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), name, lambda *of, by=right, f=factor: f * by(*of))
            with pytest.raises(MechanismMismatchError, match=message):
                probe_mechanisms(federation)
