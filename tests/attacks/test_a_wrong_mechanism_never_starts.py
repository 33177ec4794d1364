"""A run probes its own mechanism; one that differs from the charge ends it before round 1."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.clients.gradients.rule_gradients import RuleGradients
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training import block
from fedsim.clients.training.member import StreamKey
from fedsim.core.streams import Purpose
from fedsim.experiment import load_experiment
from fedsim.federation import nodes
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.federation.mechanism_probe import MechanismMismatchError, probe_mechanisms
from fedsim.noise import release
from fedsim.noise.sources import NoiseSource, SecureNoise, SeededNoise
from fedsim.runs.runner import run_experiment

pytestmark = pytest.mark.usefixtures("whole_probe")

EXPERIMENT: dict[str, Any] = {
    "name": "probed",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 4}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 2},
    "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
Mutation = Callable[[pytest.MonkeyPatch], None]


def experiment(**sections: Any) -> dict[str, Any]:
    return {**EXPERIMENT, **{k: v and {**EXPERIMENT.get(k, {}), **v} for k, v in sections.items()}}


def federation(**sections: Any) -> Federation:
    return assemble(load_experiment(experiment(**sections)), ledger=None, in_process=True)


def scaled_noise(source: type[NoiseSource]) -> Mutation:
    """Return a change to noise that is 3 % too small."""

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        fill = release.fill_rows_

        def smaller(sources: Any, rows: Tensor) -> None:
            fill(sources, rows)
            if isinstance(sources[0], source):
                rows *= 0.97

        monkeypatch.setattr(release, "fill_rows_", smaller)

    return change


def charged_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step believes in its noise; its event has 3 % more."""
    whole = DpSgdMechanism.standard_deviations
    monkeypatch.setattr(
        DpSgdMechanism,
        "standard_deviations",
        lambda self, groups: tuple(0.97 * sigma for sigma in whole(self, groups)),
    )


def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "fill_rows_", lambda sources, rows: rows.zero_())


def no_noise_on_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = block._DpSgdBlock.take_step

    def forgetful(self: Any, batches: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if any(batch is not None and len(batch) for batch in batches):
                no_noise(patch)
            whole(self, batches)

    monkeypatch.setattr(block._DpSgdBlock, "take_step", forgetful)


def loose_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RuleGradients.clipped

    def loose(self: RuleGradients, values: Any, padded: Any, clip: Any) -> Any:
        return whole(self, values, padded, replace(clip, scales=1.03 * clip.scales))

    monkeypatch.setattr(RuleGradients, "clipped", loose)


def of_round_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StreamKey.noise
    monkeypatch.setattr(
        StreamKey,
        "noise",
        lambda self, **given: whole(replace(self, round_number=1), **given),
    )


def of_client_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StreamKey.noise
    monkeypatch.setattr(
        StreamKey, "noise", lambda self, **given: whole(replace(self, client=0), **given)
    )


def again_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = release.fill_rows_

    def again(sources: Any, rows: Tensor) -> None:
        if not hasattr(sources[0], "first_noise"):
            whole(sources, rows)
            sources[0].first_noise = rows.clone()
        rows.copy_(sources[0].first_noise)

    monkeypatch.setattr(release, "fill_rows_", again)


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "noise 3 % too small": (scaled_noise(SeededNoise), r"(multiplier|clients) is 0\.9[67]\d*"),
    "noise charged as 3 % more": (charged_as_more, r"(multiplier|clients) is 0\.9[67]\d*"),
    "no noise": (no_noise, r"the noise multiplier is 0, and (1|0\.999\d) is charged"),
    "no noise where there are examples": (
        no_noise_on_examples,
        r"the noise multiplier is 0, and (1|0\.999\d) is charged",
    ),
    "clipping 3 % too loose": (loose_clipping, "an example contributes 1.03 clipping bounds"),
    "noise repeated from round to round": (of_round_one, "repeats from round to round"),
    "noise repeated from step to step": (again_in_each_step, "repeats from step to step"),
    "noise shared by clients": (of_client_zero, "clients 0 and 1 have noise in common"),
}


@pytest.mark.parametrize(("mutation", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_mechanism_ends_the_run_before_anything_is_spent(
    mutation: Mutation, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutation(monkeypatch)
    with pytest.raises(MechanismMismatchError, match=message) as caught:
        run_experiment(experiment(), out=tmp_path / "run")
    assert "nothing was charged or released" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_wrong_mechanism_ends_a_resume_before_anything_is_spent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_experiment(experiment(federation={"rounds": 1}), out=tmp_path / "run")
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    loose_clipping(monkeypatch)
    with pytest.raises(MechanismMismatchError, match="an example contributes"):
        run_experiment(experiment(), out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def test_noise_of_the_operating_system_is_probed_at_its_own_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secure = federation(privacy={"noise": "secure"})
    probe_mechanisms(secure)
    scaled_noise(SecureNoise)(monkeypatch)
    with pytest.raises(MechanismMismatchError, match=r"noise .* is 0\.9[5-8]"):
        probe_mechanisms(secure)


SOUND: dict[str, dict[str, Any]] = {
    "per layer": {"privacy": {"clipping": "per_layer"}},
    "automatic": {"privacy": {"clipping": "automatic"}},
    "adaptive": {"privacy": {"clipping": {"name": "adaptive", "count_noise": 1.6}}},
    "shuffled": {"privacy": {"sampling": "shuffle"}},
    "balls and bins": {"privacy": {"sampling": "balls_and_bins"}},
    "fixed size": {"privacy": {"sampling": "fixed_size", "adjacency": "replace_one"}},
    "private sizes": {"privacy": {"adjacency": {"name": "add_remove", "declared_examples": 300}}},
    "much noise": {"privacy": {"noise_multiplier": 1e4}},
    "a bound that no gradient reaches": {"privacy": {"max_grad_norm": 1e6}},
    "batches in parts": {"local": {"max_physical_batch": 7}},
    "clients alone": {"local": {"vectorized_clients": "off"}},
    "some clients without noise": {"privacy": {"clients": {"1": {"noise_multiplier": 0.0}}}},
    "nobody with noise": {"privacy": {"noise_multiplier": 0.0}},
    "empty batches": {"privacy": {"sampling": {"name": "poisson", "rate": 1e-7}}},
    "convolutions": {"model": {"name": "cnn"}},
    "no privacy": {"privacy": None},
}


@pytest.mark.parametrize("sections", SOUND.values(), ids=SOUND)
def test_a_right_mechanism_passes_and_leaves_no_trace(sections: dict[str, Any]) -> None:
    sound = federation(**sections)
    before, state = sound.model.shared.parameters.data.clone(), torch.get_rng_state()
    probe_mechanisms(sound)
    assert torch.equal(sound.model.shared.parameters.data, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_of_ones_own_with_dropout_passes(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))\n"
    )
    loaded = load_experiment(experiment(model={"name": "./net.py:build"}), base=tmp_path)
    own = assemble(loaded, ledger=None, in_process=True)
    assert own.model.gradients is not None
    assert not own.model.gradients.stacks
    probe_mechanisms(own)


def test_one_group_of_one_client_with_too_little_noise_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client 2 has a setting of its own; of its groups, only the last one has too little noise."""
    own = federation(
        privacy={"clipping": "per_layer", "clients": {"2": {"noise_multiplier": 0.8}}},
        model={"name": "mlp", "args": {"hidden": [32]}},
        local={"vectorized_clients": "off"},
    )
    fill, whole = release.fill_rows_, block._DpSgdBlock.take_step

    def smaller(sources: Any, rows: Tensor) -> None:
        fill(sources, rows)
        rows[:, -330:] *= 0.8

    def take_step(self: Any, batches: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self._mechanisms[0].noise_multiplier == 0.8:
                patch.setattr(release, "fill_rows_", smaller)
            whole(self, batches)

    monkeypatch.setattr(block._DpSgdBlock, "take_step", take_step)
    with pytest.raises(
        MechanismMismatchError, match=r"client 2: the noise multiplier is 0\.[89]\d+, and 1\.131 is"
    ):
        probe_mechanisms(own)


@pytest.mark.parametrize(
    ("factor", "whole", "message"),
    [
        (0.0, 0.0, r"multiplier is 0, and 3\.[12]\d* is charged"),
        (0.2, 0.0, r"multiplier is 0\.[5-8]\d*, and 3\.[12]\d* is charged"),
        (1.0, 1.0, r"contributes 3 clipping bounds"),
    ],
    ids=["no noise", "a fifth of the noise", "an example that counts twice"],
)
def test_counts_of_adaptive_clipping_are_as_charged_or_never_start(
    factor: float, whole: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts are charged beside the gradients, which have their noise here."""
    bounds = {"*weight": {"max_grad_norm": 0.5}, "*bias": {"max_grad_norm": 0.1}}
    groups = {"name": "adaptive", "count_noise": 1.6, "groups": bounds}
    own = federation(privacy={"clipping": groups, "max_grad_norm": None})
    probe_mechanisms(own)
    adapt = DpSgdMechanism.adapt

    def wrong(self: DpSgdMechanism, statistics: Any, noise: NoiseSource) -> DpSgdMechanism:
        more = tuple(w + whole * (w - statistics.examples / 2) for w in statistics.within)
        with pytest.MonkeyPatch.context() as patch:
            fill = release.fill_rows_

            def smaller(sources: Any, rows: Tensor) -> None:
                fill(sources, rows)
                rows *= factor

            patch.setattr(release, "fill_rows_", smaller)
            return adapt(self, replace(statistics, within=more), noise)

    monkeypatch.setattr(DpSgdMechanism, "adapt", wrong)
    with pytest.raises(MechanismMismatchError, match=message):
        probe_mechanisms(own)


def test_no_stream_of_the_run_is_used_and_no_private_example(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The keys of the probe and of a run of its experiment have nothing in common."""
    keys: dict[str, set[bytes]] = {"probe": set(), "run": set()}
    now = "probe"
    whole = StreamKey.key_bytes

    def noted(self: StreamKey, purpose: Purpose) -> bytes:
        keys[now].add(whole(self, purpose))
        return whole(self, purpose)

    monkeypatch.setattr(StreamKey, "key_bytes", noted)
    probed = federation()
    monkeypatch.setattr(
        Federation, "client_task", lambda self, client: pytest.fail("a private example was read")
    )
    probe_mechanisms(probed)
    monkeypatch.undo()
    monkeypatch.setattr(StreamKey, "key_bytes", noted)
    monkeypatch.setattr("fedsim.runs.runner.probe_mechanisms", lambda federation: None)
    now = "run"
    run_experiment(experiment(), out=tmp_path / "run")
    assert keys["probe"]
    assert keys["run"]
    assert not keys["probe"] & keys["run"]


def test_each_process_probes_the_mechanism_that_it_will_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers and nodes assemble a federation of their own, and probe it before its first task."""
    whole = federation()
    shard = nodes.FederationClientApp(whole, None).shard([0])
    source = nodes.TaskSource(whole.experiment.model_dump_json(), whole.base, None)
    nodes._assembled.cache_clear()
    no_noise(monkeypatch)
    with pytest.raises(MechanismMismatchError):
        shard(None)
    with pytest.raises(MechanismMismatchError):
        source(0)


def test_a_private_client_in_another_process_needs_a_ledger_on_disk() -> None:
    """In memory only, its charges would be forgotten with the process."""
    whole = federation()
    nodes._assembled.cache_clear()
    with pytest.raises(ValueError, match="needs a ledger on disk"):
        nodes.TaskSource(whole.experiment.model_dump_json(), whole.base, None)(0)
    with pytest.raises(ValueError, match="needs a ledger on disk"):
        nodes.FederationClientApp(whole, None).shard([0])(None)


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Exact quantiles at a level where they show: 1 % of 2,000; outside of 3 to 45 with 1e-5."""
    from fedsim.federation import mechanism_probe as evidence

    rng, small, correlated = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        rows = rng.normal(size=(2, 20))
        found = evidence._Sum(float(np.square(rows).sum()), rows.size)
        small += evidence._is_too_small(found, 0.01)
        correlated += evidence._is_correlated(rows[0], rows[1], 0.01)
    assert 3 <= small <= 45
    assert 3 <= correlated <= 45


def test_the_quantiles_hold_far_out_and_for_many_values() -> None:
    """Wilson and Hilferty's approximation of chi-square agrees, at 1e-11 and up to 10^8 values."""
    from scipy.special import gammaincinv, ndtri

    for count in (100, 10_000, 10**8):
        exact = 2 * gammaincinv(count / 2, 1e-11) / count
        spread = (2 / (9 * count)) ** 0.5
        assert exact == pytest.approx((1 - spread**2 + spread * ndtri(1e-11)) ** 3, rel=0.02)
