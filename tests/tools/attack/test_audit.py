"""An audit passes sound mechanisms and names the bug of each broken one."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedsim.clients.clipping.clipping import Groups
from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.sampling.sampling import PoissonSampling
from fedsim.clients.training.member import StreamKey
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.noise import release
from fedsim.noise.sources import NoiseSource, SeededNoise
from fedsim.tools.attack import observation as observing
from fedsim.tools.attack.audit import audit_experiment
from fedsim.tools.attack.findings import Audit

CONFIDENCE = 1 - 1e-6  # the false-alarm rate of a changed draw; the seed is fixed


def experiment(**sections: Any) -> LoadedExperiment:
    content: dict[str, Any] = {
        "name": "audited",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 5}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 10},
        "local": {"steps": 5, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
    }
    for name, section in sections.items():
        content[name] = section and {**content[name], **section}
    return load_experiment(content)


def audited(steps: int = 20, clients: int = 1, **sections: Any) -> Audit:
    return audit_experiment(
        experiment(**sections), clients=clients, steps=steps, confidence=CONFIDENCE
    )


SOUND: dict[str, dict[str, Any]] = {
    "flat": {},
    "little noise": {"privacy": {"noise_multiplier": 0.5}},
    "per layer": {"privacy": {"clipping": "per_layer"}},
    "automatic": {"privacy": {"clipping": "automatic"}},
    "adaptive": {"privacy": {"clipping": {"name": "adaptive", "count_noise": 1.6}}},
    "shuffled": {"privacy": {"sampling": "shuffle"}},
    "balls and bins": {"privacy": {"sampling": "balls_and_bins"}},
    "fixed size": {"privacy": {"sampling": "fixed_size", "adjacency": "replace_one"}},
    "everybody in each batch": {"local": {"batch_size": 288}},
    "secure noise": {"privacy": {"noise": "secure"}},
    "batches in parts": {"local": {"max_physical_batch": 8}},
    "momentum": {"local": {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}}},
    "convolutions": {"model": {"name": "cnn"}},
}


@pytest.mark.parametrize("sections", SOUND.values(), ids=SOUND)
def test_what_is_sound_passes_and_leaks_no_more_than_it_claims(sections: dict[str, Any]) -> None:
    found = audited(**sections)
    assert found.violations == ()
    (client,) = found.clients
    assert 0.0 < client.findings.epsilon <= client.claim.epsilon
    assert client.findings.noise.estimate == pytest.approx(1.0, abs=0.05)
    assert client.findings.contribution.estimate == pytest.approx(1.0, abs=1e-3)


def test_the_bound_and_the_estimate_are_close_to_the_claim() -> None:
    """Power: an audit that always says 0 would pass everything."""
    (client,) = audited(steps=300).clients
    assert client.findings.epsilon > 0.85 * client.claim.epsilon
    assert client.findings.epsilon_estimate == pytest.approx(client.claim.epsilon, rel=0.03)


@pytest.mark.parametrize("factor", [0.7, 0.97])
def test_less_noise_than_charged_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    whole = release.fill_rows_

    def smaller(sources: Any, rows: Tensor) -> None:
        whole(sources, rows)
        rows *= factor

    monkeypatch.setattr(release, "fill_rows_", smaller)
    for client in audited(steps=80).clients:
        texts = client.violations
        assert client.findings.noise.estimate == pytest.approx(factor, rel=0.015)
        assert any("of what is charged" in text for text in texts)
        assert any("is claimed" in text for text in texts) == (factor == 0.7)


def test_noise_that_is_charged_as_more_than_it_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself believes in its noise; what counts is the event that it is charged as."""
    whole = DpSgdMechanism.standard_deviations

    def halved(self: DpSgdMechanism, groups: Groups) -> tuple[float, ...]:
        return tuple(sigma / math.sqrt(2.0) for sigma in whole(self, groups))

    monkeypatch.setattr(DpSgdMechanism, "standard_deviations", halved)
    for client in audited().clients:
        assert client.findings.noise.estimate == pytest.approx(math.sqrt(0.5), rel=0.02)
        assert any("of what is charged" in text for text in client.violations)


@pytest.mark.parametrize("factor", [1.03, 5.0])
def test_clipping_that_does_not_hold_is_found(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    whole = RuleGradients.clipped

    def unclipped(self: RuleGradients, values: Any, padded: Any, clip: Any) -> Any:
        return whole(self, values, padded, replace(clip, scales=factor * clip.scales))

    monkeypatch.setattr(RuleGradients, "clipped", unclipped)
    for client in audited().clients:
        assert any("times the clipping bound" in text for text in client.violations)
        assert any("is claimed" in text for text in client.violations) == (factor == 5.0)


def test_examples_in_more_batches_than_charged_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PoissonSampling.draw_batch
    monkeypatch.setattr(
        PoissonSampling,
        "draw_batch",
        lambda self, n, rng: whole(replace(self, rate=1.1 * self.rate), n, rng),
    )
    for client in audited(steps=60, local={"batch_size": 144}).clients:
        assert any(text.startswith("batches hold 1.") for text in client.violations)


def test_one_batch_for_all_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is right on average, but for those in the batch it is 1."""
    monkeypatch.setattr(
        PoissonSampling,
        "draw_batch",
        lambda self, n, rng: np.flatnonzero(np.random.default_rng(0).random(n) < self.rate),
    )
    for client in audited().clients:
        assert any(text.startswith("batches hold") for text in client.violations)
        assert client.findings.epsilon > client.claim.epsilon


def test_shuffled_data_charged_as_poisson_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example is in the right number of batches, but in turn."""

    def shuffled(self: PoissonSampling, examples: int, stream: Any, **_: Any) -> Iterator[Any]:
        batches = round(1.0 / self.rate)
        while True:
            yield from np.array_split(stream.permutation(examples), batches)

    monkeypatch.setattr(PoissonSampling, "draw_batches", shuffled)
    local = {"steps": 9, "batch_size": 32}  # whole epochs in a round
    for client in audited(steps=36, local=local).clients:
        assert [text for text in client.violations if "not drawn independently" in text]
        assert client.findings.sampling_rate.estimate == pytest.approx(1.0, abs=0.05)


def test_noise_of_one_seed_for_all_rounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StreamKey.noise

    def stale(self: StreamKey, **given: Any) -> NoiseSource:
        return whole(replace(self, round_number=1), **given)

    monkeypatch.setattr(StreamKey, "noise", stale)
    for client in audited().clients:
        assert any("from round to round" in text for text in client.violations)


def test_noise_that_is_the_same_in_each_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = release.fill_rows_

    def again(sources: Any, rows: Tensor) -> None:
        whole([SeededNoise(bytes(32)) for _ in sources], rows)

    monkeypatch.setattr(release, "fill_rows_", again)
    for client in audited().clients:
        assert any("from step to step" in text for text in client.violations)


def test_noise_that_clients_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StreamKey.noise

    def common(self: StreamKey, **given: Any) -> NoiseSource:
        return whole(replace(self, client=0), **given)

    monkeypatch.setattr(StreamKey, "noise", common)
    found = audited(clients=3)
    assert len(found.shared_noise) == 2
    assert all("have noise in common" in text for text in found.violations)


def test_of_many_examples_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "MAX_COORDINATES", 40)
    found = audited()
    assert found.violations == ()
    for client in found.clients:
        assert client.num_examples > 200
        assert client.findings.noise_rows.shape == (20, 40)
        assert client.findings.epsilon > 0.0


def test_the_clients_of_the_largest_claims_are_audited() -> None:
    own = {"1": {"noise_multiplier": 0.8}, "3": {"noise_multiplier": 2.0}}
    found = audited(clients=2, privacy={"clients": own})
    assert 1 in {client.client for client in found.clients}
    assert 3 not in {client.client for client in found.clients}
    assert (len(found.clients), found.num_clients) == (2, 5)


def test_the_same_audit_twice_is_the_same() -> None:
    one, other = (audited().to_json() for _ in range(2))
    assert one == other
