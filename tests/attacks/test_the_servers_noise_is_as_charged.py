"""Central trust: clients add no noise, and the server's is there with the charged size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsim.clients.training import member
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.federation import charged_noise
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.noise.sources import SeededNoise
from fedsim.tools.attack.audit import audit_experiment

pytestmark = pytest.mark.usefixtures("whole_probe")

CONFIDENCE = 1 - 1e-6  # the false-alarm rate of an audit with another seed; the seed is fixed
Mutation = Callable[[pytest.MonkeyPatch], None]


def experiment(**privacy: Any) -> LoadedExperiment:
    return load_experiment(
        {
            "name": "central",
            "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
            "model": {"name": "logistic"},
            "federation": {"rounds": 20},
            "local": {"steps": 1, "batch_size": 48, "optimizer": {"name": "sgd", "lr": 0.5}},
            "privacy": {
                "trust": "central",
                "target_epsilon": 2.0,
                "delta": 1e-3,
                "max_grad_norm": 0.5,
                **privacy,
            },
        }
    )


def scaled_noise(factor: float) -> Mutation:
    """Return a change to the server's noise."""

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = charged_noise.add_noise

        def scaled(sums: Any, source: Any) -> dict[str, np.ndarray]:
            drawn = whole(sums, source)
            return {name: np.rint(value * factor).astype(np.int64) for name, value in drawn.items()}

        monkeypatch.setattr(charged_noise, "add_noise", scaled)

    return change


def one_draw_for_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        charged_noise.ServerNoise, "source", lambda self, number: SeededNoise(bytes([1]) * 32)
    )


def clients_add_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "NoNoise", lambda: SeededNoise(bytes(32)))


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "noise 3 % too small": (scaled_noise(0.97), r"multiplier is 1\.1\d+, and 1\.2"),
    "no noise": (scaled_noise(0.0), "the noise multiplier is 0, and"),
    "one draw for all rounds": (one_draw_for_all_rounds, "noise repeats from round to round"),
    "clients add noise, too": (
        clients_add_noise,
        "the client adds noise, but with privacy.trust: central",
    ),
}


QUICK = ("noise 3 % too small", "clients add noise, too")
CASES = [
    pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, case in MUTATIONS.items()
]


@pytest.mark.parametrize(("mutation", "message"), CASES)
def test_a_wrong_server_never_starts(
    mutation: Mutation, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = assemble(experiment(), ledger=None, in_process=True)
    probe_mechanisms(federation)
    mutation(monkeypatch)
    with pytest.raises(MechanismMismatchError, match=message):
        probe_mechanisms(federation)


@pytest.mark.slow
def test_an_audit_certifies_no_more_than_the_claim() -> None:
    found = audit_experiment(experiment(), clients=1, steps=600, confidence=CONFIDENCE)
    assert found.violations == ()
    (view,) = found.clients
    assert view.claim.against == "models"
    assert 0.85 * view.claim.epsilon < view.findings.epsilon <= view.claim.epsilon


@pytest.mark.slow
def test_an_audit_finds_noise_that_is_a_tenth_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_noise(0.9)(monkeypatch)
    found = audit_experiment(experiment(), clients=1, steps=200, confidence=CONFIDENCE)
    (view,) = found.clients
    assert any("of what is charged" in text for text in view.violations)
