"""Unit client: a whole update is clipped, and hidden by the noise that is charged for it.

The probe before round 1 finds a loose bound and too little noise in every cell. The audit makes a
whole client the canary, certifies no more than any claim, and finds noise that is 10 % too small.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fedsim.clients.mechanisms import client_update as updates
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.federation import charged_noise
from fedsim.federation.assembly import assemble
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.noise import release
from fedsim.tools.attack.audit import audit_experiment

pytestmark = pytest.mark.usefixtures("whole_probe")

CONFIDENCE = 1 - 1e-6  # the false-alarm rate of an audit with another seed; the seed is fixed
TRUST = ["local", "distributed", "central"]
Mutation = Callable[[pytest.MonkeyPatch], None]
slow = pytest.mark.slow


def experiment(trust: str, *, poisson: bool = False, **privacy: Any) -> LoadedExperiment:
    content: dict[str, Any] = {
        "name": "whole",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 6}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 10},
        "local": {"steps": 4, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {
            "trust": trust,
            "unit": "client",
            "noise_multiplier": 2.0,
            "delta": 1e-2,
            "max_update_norm": 0.3,
            **privacy,
        },
    }
    if trust == "distributed":
        content["secure_aggregation"] = {"min_clients": 5}
    if poisson:
        content["federation"] |= {"clients_per_round": 3, "participation": {"scheme": "poisson"}}
    return load_experiment(content)


def loose_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updates.clipped_updates
    monkeypatch.setattr(
        updates,
        "clipped_updates",
        lambda found, bounds, lengths: whole(found, 1.03 * bounds, lengths),
    )


def less_noise(factor: float) -> Mutation:
    """Return a change to all noise, of clients and of the server."""

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        fill, add = release.fill_rows_, charged_noise.add_noise

        def smaller(sources: Any, rows: Tensor) -> None:
            fill(sources, rows)
            rows *= factor

        def of_server(sums: Any, source: Any) -> Any:
            return {name: (factor * one).astype("int64") for name, one in add(sums, source).items()}

        monkeypatch.setattr(release, "fill_rows_", smaller)
        monkeypatch.setattr(charged_noise, "add_noise", of_server)

    return change


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "a bound 3 % too loose": (loose_bound, "an example contributes 1.03 clipping bounds"),
    "noise 5 % too small": (less_noise(0.95), "the noise multiplier is"),
}
ADAPTIVE = {"clipping": {"name": "adaptive", "count_noise": 3.0}}


@pytest.mark.parametrize(
    ("trust", "privacy"),
    [
        ("central", {}),
        *(pytest.param(trust, ADAPTIVE, marks=slow) for trust in ("local", "distributed")),
    ],
)
@pytest.mark.parametrize(("mutation", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_release_never_starts(
    mutation: Mutation,
    message: str,
    trust: str,
    privacy: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = assemble(experiment(trust, **privacy), ledger=None, in_process=True)
    probe_mechanisms(federation)
    mutation(monkeypatch)
    with pytest.raises(MechanismMismatchError, match=message):
        probe_mechanisms(federation)


SOUND: list[tuple[str, bool, dict[str, Any]]] = [
    ("distributed", False, {}),
    *((trust, False, ADAPTIVE) for trust in ("local", "central")),
    ("distributed", False, {"noise": "secure"}),
    ("central", True, {"noise": "secure"}),
    ("local", False, {"adjacency": "replace_one"}),
]


@slow
@pytest.mark.parametrize(("trust", "poisson", "privacy"), SOUND)
def test_an_audit_certifies_no_more_than_each_claim(
    trust: str, poisson: bool, privacy: dict[str, Any]
) -> None:
    """With an adaptive clip norm, the attack does not use the bit, and certifies less."""
    loaded = experiment(trust, poisson=poisson, **privacy)
    probe_mechanisms(assemble(loaded, ledger=None, in_process=True))
    found = audit_experiment(loaded, clients=1, steps=200, confidence=CONFIDENCE)
    assert found.violations == ()
    expected = {"local": ["server"], "distributed": ["sums", "server"], "central": ["models"]}
    assert [one.claim.against for one in found.clients] == expected[trust]
    for one in found.clients:
        claimed = one.claim.epsilon
        least = 0.2 if poisson or "adjacency" in privacy else 0.65  # the audit has power
        assert least * claimed < one.findings.epsilon <= claimed


@slow
@pytest.mark.parametrize("trust", TRUST)
def test_an_audit_finds_noise_that_is_a_tenth_too_small(
    trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deviation of 60,000 values is known to 2 % at this confidence."""
    less_noise(0.9)(monkeypatch)
    found = audit_experiment(experiment(trust), clients=1, steps=60, confidence=CONFIDENCE)
    for one in found.clients:
        assert any("of what is charged" in text for text in one.violations), one.claim.against


@slow
def test_an_audit_finds_a_bound_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each upload and of the sum."""
    loose_bound(monkeypatch)
    found = audit_experiment(experiment("distributed"), clients=1, steps=60, confidence=CONFIDENCE)
    for one in found.clients:
        assert any("times the clipping bound" in text for text in one.violations), one.claim.against
