"""The advice compares candidates by public facts, and its lines can be applied."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsim.clients.mechanisms.plan import PrivacyPlanError
from fedsim.core.formatting import epsilon_text
from fedsim.experiment import LoadedExperiment, load_experiment
from fedsim.federation.federation import Federation
from fedsim.planning.projection import plan_experiment
from fedsim.runs.runner import run_experiment
from fedsim.tools.advice import ranking
from fedsim.tools.advice.advice import Advice, advise_experiment
from fedsim.tools.advice.noise import PLAUSIBLE_TASKS, Schedules, noise_to_signal

DATA = """
import numpy as np

def load(seed=0, *, scale=1.0, classes=3):
    rng = np.random.default_rng(seed)
    x = scale * rng.normal(size=(600, 6)) ** (1 if scale == 1.0 else 3)
    return x.astype(np.float32), np.arange(600) % classes
"""
SMALL: dict[str, Any] = {
    "name": "advice",
    "data": {
        "dataset": "./data.py:load",
        "partition": {"scheme": "quantity", "num_clients": 5, "min_examples": 30},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 20},
    "local": {"steps": 5, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 2.0}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
OLD_QUICKSTART: dict[str, Any] = {
    "name": "old-quickstart",
    "data": {
        "dataset": "digits",
        "partition": {
            "scheme": "dirichlet",
            "num_clients": 10,
            "alpha": 0.5,
            "min_examples": 20,
        },
    },
    "model": {"name": "mlp", "args": {"hidden": [32], "activation": "tanh"}},
    "federation": {"rounds": 60, "weighting": "uniform"},
    "local": {"steps": 5, "batch_size": 28, "optimizer": {"name": "sgd", "lr": 1.0}},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)


def advised(experiment: Mapping[str, Any] = SMALL, **overrides: Any) -> Advice:
    changes = {path.replace("__", "."): value for path, value in overrides.items()}
    return advise_experiment(load_experiment(experiment, changes))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    base = tmp_path_factory.mktemp("small")
    (base / "data.py").write_text(DATA)
    return advise_experiment(load_experiment(SMALL, base=base))


@pytest.fixture(scope="module")
def old_quickstart() -> Advice:
    return advise_experiment(load_experiment(OLD_QUICKSTART))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        keep = not isinstance(value, Mapping) or path in ("local.optimizer", "federation.weighting")
        found |= {path: value} if keep else flattened(value, f"{path}.")
    return found


@pytest.mark.parametrize(
    ("epsilon", "rounds"),
    [(8.0, (20, 60)), pytest.param(1.0, (5, 30), marks=pytest.mark.slow)],
)
def test_the_old_quickstart_gets_full_batches_one_step_a_round_and_weights_by_size(
    epsilon: float, rounds: tuple[int, int], old_quickstart: Advice
) -> None:
    advice = old_quickstart
    if epsilon != 8.0:
        advice = advised(OLD_QUICKSTART, privacy__target_epsilon=epsilon)
    proposal = advice.proposal
    assert proposal is not None
    assert proposal.changes["local.batch_size"] == "full"
    assert proposal.changes["local.steps"] == 1
    assert proposal.changes["federation.weighting"] in ("examples", "examples_over_noise")
    assert rounds[0] <= proposal.candidate.rounds <= rounds[1]
    assert proposal.ratio < 0.7
    assert proposal.ratio_range[1] < 1.0
    assert "privacy.noise_correlation" not in proposal.changes
    assert proposal.noise_is_exact


def test_a_linear_model_is_named_where_it_has_fewer_trained_values(old_quickstart: Advice) -> None:
    notes = old_quickstart.notes
    assert any("2,410" in note and "650" in note and "features" in note for note in notes)


@pytest.mark.slow
def test_secure_aggregation_is_a_statement_and_promises_no_less_noise(small: Advice) -> None:
    secure = {"secure_aggregation": {"protocol": "additive", "aggregators": 2}}
    summed = advised({**SMALL, **secure})
    before, after = (
        [row.noise_multiplier for row in advice.rows[:2]] for advice in (small, summed)
    )
    assert before == after
    local = "trust: every candidate protects each upload by its own noise (local)"
    assert local in small.notes
    assert local in summed.notes


def test_equal_sizes_give_the_same_bytes_whatever_the_values(small: Advice) -> None:
    other = json.dumps(advised(data__args={"scale": 50.0}).to_json())
    assert other == json.dumps(small.to_json())
    assert "nan" not in other.lower()


def test_no_example_of_a_client_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.data.load import ClientExamples

    def read(self: ClientExamples, index: object) -> None:
        raise AssertionError(f"the examples of client {index} were read")

    monkeypatch.setattr(ClientExamples, "__getitem__", read)
    monkeypatch.setattr(ClientExamples, "__iter__", lambda self: read(self, "any"))
    assert advised().proposal is not None


def test_the_lines_can_be_applied_and_spend_the_same_epsilon(small: Advice, tmp_path: Path) -> None:
    advice = small
    assert advice.proposal is not None
    assert not any("fewer trained values" in note for note in advice.notes)
    lines = flattened(yaml.safe_load(advice.lines))
    assert lines == dict(advice.proposal.changes)
    result = run_experiment(SMALL, overrides=lines, out=tmp_path / "run")
    assert result.status == "completed"
    assert result.privacy is not None
    assert epsilon_text(result.privacy.system_epsilon) == "2"
    noise = [client.noise_multiplier for client in result.privacy.clients]
    assert advice.proposal.noise_multiplier == (min(noise), max(noise))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"privacy__noise_multiplier": 2.0, "privacy__target_epsilon": None},
        {"privacy__clients": {"0": {"sampling_rate": 0.3}}},
        {
            "privacy__adjacency": {"name": "add_remove", "declared_examples": 100},
            "privacy__clients": {"careful": {"share": 0.4, "target_epsilon": 0.5}},
        },
        {"privacy__adjacency": "replace_one", "privacy__sampling": "fixed_size"},
        {"privacy__accountant": "rdp", "privacy__sampling": "balls_and_bins"},
        {
            "federation__clients_per_round": 2,
            "privacy__noise": "secure",
            "local__optimizer": {"name": "adam", "lr": 0.01},
        },
    ],
    ids=lambda one: " ".join(one),
)
def test_whatever_plan_accepts_gets_advice_that_a_run_accepts(overrides: dict[str, Any]) -> None:
    changes = {path.replace("__", "."): value for path, value in overrides.items()}
    loaded = load_experiment(SMALL, changes)
    advice = advise_experiment(loaded)
    assert np.isfinite([row.noise_to_signal for row in advice.rows]).all()
    json.dumps(advice.to_json(), allow_nan=False)
    if advice.proposal is not None:
        content = loaded.experiment.model_dump(mode="json")
        other = load_experiment(content, advice.proposal.changes, base=loaded.base)
        planned = plan_experiment(other)
        assert planned.refusal is None
        assert planned.system_epsilon is not None
        assert planned.system_epsilon <= max(advice.facts.epsilons) * (1.0 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "batch", "steps", "gains"),
    [(2500, 50, 250, True), (144, 28, 300, False)],
    ids=["5 passes", "58 passes"],
)
def test_correlated_noise_is_named_where_it_gains(
    size: int, batch: int, steps: int, gains: bool
) -> None:
    """The cases of docs/howto/correlated_noise.md: few passes over the data, and many."""
    Path("data.py").write_text(DATA.replace("600", str(5 * size)))
    advice = advised(
        data__partition={"scheme": "iid", "num_clients": 4},
        data__test_fraction=0.2,
        federation__rounds=steps,
        local={"steps": 1, "batch_size": batch, "optimizer": {"name": "sgd", "lr": 0.5}},
        privacy__target_epsilon=8.0,
    )
    row = next(row for row in advice.rows if row.candidate.correlation is not None)
    assert (row.all_noise < 0.75 * advice.rows[0].all_noise).all() == gains
    assert (row.all_noise > advice.rows[0].all_noise).all() != gains
    assert (row.ratio < 1.0) == gains
    assert advice.proposal is None or advice.proposal.candidate.correlation is None


def test_private_sizes_stay_out_of_the_weights() -> None:
    advice = advised(privacy__adjacency={"name": "add_remove", "declared_examples": 100})
    assert {row.candidate.weighting for row in advice.rows} == {"uniform"}


@pytest.mark.slow
def test_a_file_that_a_budget_forbids_keeps_its_refusal() -> None:
    advice = advised(privacy__noise_multiplier=0.5)
    plan = plan_experiment(load_experiment(SMALL, {"privacy.noise_multiplier": 0.5}))
    assert advice.refusal == plan.refusal
    assert advice.refusal is not None


def test_nothing_to_advise_without_privacy() -> None:
    with pytest.raises(PrivacyPlanError, match="no privacy section"):
        advised(privacy=None)


@pytest.mark.slow
def test_batches_of_a_hundred_different_rates_are_calibrated_at_most_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One noise for each size takes seconds; candidates get theirs from a closed form."""
    planned, sampled = ranking.with_plans, []

    def counted(federation: Federation, loaded: LoadedExperiment) -> Any:
        if loaded.experiment.local.batch_size != "full":
            sampled.append(loaded)
        return planned(federation, loaded)

    monkeypatch.setattr(ranking, "with_plans", counted)
    many = {"partition": {"scheme": "quantity", "num_clients": 100, "min_examples": 2}}
    advised({**OLD_QUICKSTART, "data": {"dataset": "digits", **many}})
    assert len(sampled) <= 1


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedsim.cli import main

    Path("e.json").write_text(json.dumps(SMALL))
    before = Path("e.json").read_bytes()
    monkeypatch.setattr("sys.argv", ["fedsim", "plan", "e.json", "--advise", "--json"])
    main()
    content = json.loads(capsys.readouterr().out)
    assert content["proposal"]["local.batch_size"] == "full"
    monkeypatch.setattr("sys.argv", ["fedsim", "plan", "e.json", "--advise"])
    main()
    printed = capsys.readouterr().out
    assert content["yaml"] in printed
    assert "no training was done" in printed
    assert Path("e.json").read_bytes() == before
    monkeypatch.setattr("sys.argv", ["fedsim", "plan", "e.json", "--advise", "--plot", "p.svg"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2


def schedules(**changed: float) -> Schedules:
    values = {
        "rounds": 30.0,
        "steps": 1.0,
        "reach": 4.0,
        "noise": 0.1,
        "sampling": 0.0,
        "weight_skew": 0.0,
    } | changed
    return Schedules(**{name: np.array([value]) for name, value in values.items()}, label_skew=0.1)


@pytest.mark.parametrize(
    "worse",
    [
        {"noise": 0.2},
        {"sampling": 10.0},
        {"weight_skew": 0.1},
        {"rounds": 6.0, "steps": 5.0},
        {"reach": 0.02},
        {"reach": 400.0},
    ],
    ids=lambda one: " ".join(one),
)
def test_the_predicted_error_grows_with_each_of_its_causes(worse: dict[str, float]) -> None:
    for task in PLAUSIBLE_TASKS:
        assert noise_to_signal(schedules(**worse), task) > noise_to_signal(schedules(), task)


def test_noise_grows_as_in_a_simulated_contraction() -> None:
    """Noise of the closed form against 4,000 noisy descents on one quadratic."""
    task = PLAUSIBLE_TASKS[4]
    rng, h, steps = np.random.default_rng(0), task.curvature * 4.0, 30
    curvatures = task.spread ** np.linspace(1.0, 0.0, 6)
    walk = np.zeros((4000, 6))
    for _ in range(steps):
        walk = (1.0 - h * curvatures) * walk + h * rng.normal(size=walk.shape)
    quiet, noisy = (
        noise_to_signal(schedules(noise=value), task)[0] for value in (0.0, task.alignment)
    )
    signal = np.mean(1.0 - (1.0 - h * curvatures) ** steps)
    measured = np.square(walk).mean() / signal**2
    assert noisy - quiet == pytest.approx(measured, rel=0.05)  # 24,000 draws: 5 % is 5 deviations


def test_distributed_trust_is_named_with_its_gain_and_what_it_needs() -> None:
    small = {"local__steps": 1, "privacy__target_epsilon": 0.5}
    (note,) = [one for one in advised(**small).notes if one.startswith("distributed trust")]
    ratio = float(note.split("× ")[1].split(" ")[0])
    assert 0.2 < ratio < 0.9  # 4 honest shares: a quarter of the noise's variance
    assert (
        "privacy: {trust: distributed}; secure_aggregation: {aggregators: 2, min_clients: 5}"
        in (note)
    )
    refused = advised(privacy__clipping="per_layer").notes
    assert any(one.startswith("distributed trust cannot run here") for one in refused)


def test_a_shorter_schedule_may_leave_a_client_without_a_round() -> None:
    advice = advised(
        data__partition={"scheme": "quantity", "num_clients": 12, "min_examples": 10},
        federation={"rounds": 60, "clients_per_round": 2},
        local__steps=1,
        privacy__target_epsilon=0.5,
    )
    assert advice.proposal is not None
    assert advice.proposal.candidate.rounds < 60


def test_clipping_without_noise_has_no_epsilon_to_keep() -> None:
    with pytest.raises(PrivacyPlanError, match="without noise ε is infinite"):
        advised(privacy__target_epsilon=None, privacy__noise_multiplier=0)


def test_the_advice_is_of_local_trust() -> None:
    with pytest.raises(PrivacyPlanError, match="call it with privacy"):
        advised(privacy__trust="central", local__steps=1)
