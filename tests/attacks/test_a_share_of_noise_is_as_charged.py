"""Distributed trust: the noise of each client's share is there, in its own upload and in a sum.

The probe before round 1 finds a share that is too small; the audit of both views finds it too, and
certifies no more than is claimed against whoever sees sums, and against the server.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fedsim.clients.mechanisms.contract import SumPart
from fedsim.clients.training.member import StreamKey
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.noise import release
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.attack.findings import Audit, ClientAudit

pytestmark = pytest.mark.usefixtures("whole_probe")

CONFIDENCE = 1 - 1e-6  # the false-alarm rate of an audit with another seed; the seed is fixed
Mutation = Callable[[pytest.MonkeyPatch], None]


def experiment(**sections: Any) -> LoadedExperiment:
    content: dict[str, Any] = {
        "name": "shared",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 6}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 20},
        "local": {"steps": 1, "batch_size": 48, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {
            "trust": "distributed",
            "target_epsilon": 2.0,
            "delta": 1e-3,
            "max_grad_norm": 0.5,
        },
        "secure_aggregation": {"min_clients": 5},
    }
    for name, section in sections.items():
        content[name] = {**content[name], **section}
    return load_experiment(content)


def federation(**sections: Any) -> Federation:
    return assemble(experiment(**sections), ledger=None, in_process=True)


def scaled_noise(factor: float) -> Mutation:
    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        fill = release.fill_rows_

        def smaller(sources: Any, rows: Tensor) -> None:
            fill(sources, rows)
            rows *= factor

        monkeypatch.setattr(release, "fill_rows_", smaller)

    return change


def more_honest_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charge counts on all five clients of a sum, and one of them may collude."""
    monkeypatch.setattr(SumPart, "noise_factor", property(lambda self: (self.honest + 1) ** 0.5))


def noise_of_client_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StreamKey.noise
    monkeypatch.setattr(
        StreamKey, "noise", lambda self, **given: whole(replace(self, client=0), **given)
    )


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "a share 3 % too small": (scaled_noise(0.97), r"multiplier is 0\.5[01]\d*, and 0\.52"),
    "no noise": (scaled_noise(0.0), "the noise multiplier is 0, and"),
    "a charge that trusts a colluder": (more_honest_clients, "the noise multiplier is"),
    "one noise for all clients": (noise_of_client_zero, "have noise in common"),
}


QUICK = ("a share 3 % too small", "a charge that trusts a colluder")
CASES = [
    pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, case in MUTATIONS.items()
]


@pytest.mark.parametrize(("mutation", "message"), CASES)
def test_a_wrong_share_never_starts(
    mutation: Mutation, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(MechanismMismatchError, match=message):
        probe_mechanisms(
            federation(privacy={"target_epsilon": 4.0}, local={"vectorized_clients": "off"})
        )


@pytest.mark.parametrize("factor", [pytest.param(0.97, marks=pytest.mark.slow), 1.03])
def test_a_grid_that_is_not_the_one_of_the_sum_never_starts(factor: float) -> None:
    """Shorter steps make the noise small, longer ones the contribution large."""
    whole = federation()
    assert whole.plan.sums is not None
    sums = replace(whole.plan.sums, unit=factor * whole.plan.sums.unit)
    other = replace(whole, plan=replace(whole.plan, sums=sums))
    with pytest.raises(
        MechanismMismatchError, match=r"noise multiplier is|clipping bounds to a sum"
    ):
        probe_mechanisms(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"privacy": {"noise": "secure"}},
        {"privacy": {"clients": {"2": {"target_epsilon": 1.0}}}},
        {
            "privacy": {
                "trust": {"name": "distributed", "colluding_clients": 0, "fallback_epsilon": 3.0}
            }
        },
        {"privacy": {"adjacency": "replace_one"}},
    ],
)
def test_a_right_share_passes(sections: dict[str, Any]) -> None:
    probe_mechanisms(federation(**sections))


def views_of(audit: Audit) -> dict[str, ClientAudit]:
    assert len({one.client for one in audit.clients}) == 1
    return {one.claim.against: one for one in audit.clients}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections", [{}, {"privacy": {"noise": "secure"}, "model": {"name": "mlp"}}]
)
def test_an_audit_certifies_no_more_than_either_claim(sections: dict[str, Any]) -> None:
    found = audit_experiment(experiment(**sections), clients=1, steps=200, confidence=CONFIDENCE)
    assert found.violations == ()
    views = views_of(found)
    assert set(views) == {"sums", "server"}
    for view in views.values():
        claimed = view.claim.epsilon
        assert 0.85 * claimed < view.findings.epsilon <= claimed  # an audit has power
        assert view.findings.epsilon_estimate == pytest.approx(claimed, rel=0.03)
    assert views["sums"].claim.epsilon <= 2.0 < views["server"].claim.epsilon


@pytest.mark.slow
def test_an_audit_finds_a_share_that_is_a_tenth_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deviation of 160,000 values and more is known to 1.2 % at this confidence."""
    scaled_noise(0.9)(monkeypatch)
    found = audit_experiment(experiment(), clients=1, steps=200, confidence=CONFIDENCE)
    for view in views_of(found).values():
        assert view.findings.noise.estimate == pytest.approx(0.9, rel=0.02)
        assert any("of what is charged" in text for text in view.violations)


@pytest.mark.slow
def test_an_audit_finds_a_charge_that_trusts_a_colluder(monkeypatch: pytest.MonkeyPatch) -> None:
    more_honest_clients(monkeypatch)
    found = audit_experiment(experiment(), clients=1, steps=200, confidence=CONFIDENCE)
    views = views_of(found)
    assert any("of what is charged" in text for text in views["sums"].violations)
    assert views["server"].violations == ()


@pytest.mark.slow
def test_an_audit_finds_clients_that_add_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four honest clients two add none: the own share is whole, and the sum is not."""
    whole = StreamKey.noise

    def noise(self: StreamKey, **keywords: Any) -> Any:
        source = whole(self, **keywords)
        if self.client in (1, 2):
            source.fill_ = lambda values: values.zero_()
        return source

    fill = release.fill_rows_

    def one_by_one(sources: Any, rows: Tensor) -> None:
        for source, row in zip(sources, rows, strict=True):
            if "fill_" in vars(source):
                row.zero_()
            else:
                fill([source], row.unsqueeze(0))

    monkeypatch.setattr(StreamKey, "noise", noise)
    monkeypatch.setattr(release, "fill_rows_", one_by_one)
    found = audit_experiment(experiment(), clients=1, steps=60, confidence=CONFIDENCE)
    views = views_of(found)
    assert views["sums"].findings.noise.estimate == pytest.approx(0.5**0.5, rel=0.05)
    assert any("of what is charged" in text for text in views["sums"].violations)
    assert views["server"].violations == ()
