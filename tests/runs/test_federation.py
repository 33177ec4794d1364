"""The whole federation, against what can be computed by hand or by another library."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsim
from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.clients import client_round
from fedsim.clients.training.member import StreamKey
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.runs.runner import run_experiment
from fedsim.tracking.callbacks import RunCallback

Mapping = dict[str, Any]

PRIVATE = {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5}
NOISE = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}


def digits(**sections: object) -> Mapping:
    """A small, quick federation on digits; a section given as None is left out."""
    experiment: Mapping = {
        "name": "test",
        "data": {
            "dataset": "digits",
            "partition": {
                "scheme": "dirichlet",
                "num_clients": 4,
                "alpha": 0.5,
                "min_examples": 20,
            },
        },
        "model": {"name": "mlp", "args": {"hidden": [40]}},
        "federation": {"rounds": 3},
        "local": {"steps": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.5}},
        "privacy": NOISE,
        **sections,
    }
    return experiment


def line(tmp_path: Path, sizes: tuple[int, ...] = (2, 3)) -> Mapping:
    """Regression y = w·x + b with one client per size, by a user's dataset and model."""
    (tmp_path / "line.py").write_text(
        "import numpy as np, torch\n"
        "def load(seed=0):\n"
        f"    n = {sum(sizes)}\n"
        "    x = np.linspace(-1, 1, n, dtype=np.float32)[:, None]\n"
        "    y = (3 * x[:, 0] + 1).astype(np.float32)\n"
        "    return x, y, x, y\n"
        "def build():\n"
        "    return torch.nn.Linear(1, 1)\n"
    )
    return {
        "name": "line",
        "data": {"dataset": "./line.py:load", "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": "./line.py:build", "loss": "mse"},
        "federation": {"rounds": 3},
        "local": {"steps": 2, "batch_size": max(sizes), "optimizer": {"name": "sgd", "lr": 0.1}},
        "privacy": None,
    }


def model_of(result: fedsim.RunResult) -> dict[str, np.ndarray]:
    return load_file(result.path / "model.safetensors")


def loaded(experiment: Mapping, base: Path) -> Federation:
    return assemble(load_experiment(experiment, base=base), ledger=None)


def least_squares_by_hand(experiment: Mapping, base: Path, weights: list[float]) -> np.ndarray:
    """FedAvg of full-batch gradient descent in plain numpy, float64."""
    federation = loaded(experiment, base)
    state = federation.model.module.state_dict()
    theta = np.array([state["weight"].item(), state["bias"].item()])
    data = [
        (np.column_stack([c.features[:, 0], np.ones(len(c))]).astype(np.float64), c.targets)
        for c in federation.data.clients
    ]
    for _ in range(experiment["federation"]["rounds"]):
        local = []
        for x, y in data:
            w = theta.copy()
            for _ in range(experiment["local"]["steps"]):
                w -= 0.1 * 2 * x.T @ (x @ w - y) / len(y)
            local.append(w)
        theta = np.average(local, axis=0, weights=weights)
    return theta


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("private", [False, True])
def test_two_clients_equal_the_hand_computed_federation(
    tmp_path: Path, weighting: str, private: bool
) -> None:
    """Also: no noise, no clipping and full batches give exactly the FedAvg of gradient descent."""
    experiment = line(tmp_path)
    experiment["federation"]["weighting"] = weighting
    if private:
        experiment["privacy"] = {"noise_multiplier": 0.0, "delta": 1e-3, "max_grad_norm": 1e6}
    sizes = [len(c) for c in loaded(experiment, tmp_path).data.clients]
    assert sorted(sizes) == [2, 3]
    weights = [float(s) for s in sizes] if weighting == "examples" else [1.0, 1.0]
    expected = least_squares_by_hand(experiment, tmp_path, weights)
    model = model_of(run_experiment(experiment, base=tmp_path, out=tmp_path / "run"))
    np.testing.assert_allclose([model["weight"].item(), model["bias"].item()], expected, rtol=3e-6)


def dp_accounting_epsilon(ledger: list[Mapping], delta: float, *, pessimistic: bool) -> float:
    """Recompute ε from a ledger with dp-accounting alone, at a fine discretisation."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = None
    for entry in ledger:
        event, count = entry["event"], entry["count"]
        assert event["type"] == "PoissonSampled"
        assert event["event"]["type"] == "Gaussian"
        step = pld.from_gaussian_mechanism(
            event["event"]["noise_multiplier"],
            sampling_prob=event["sampling_rate"],
            value_discretization_interval=1e-3,
            pessimistic_estimate=pessimistic,
        )
        steps = step.self_compose(count)
        total = steps if total is None else total.compose(steps)
    assert total is not None
    return total.get_epsilon_for_delta(delta)


def test_every_epsilon_can_be_recomputed_with_another_library(tmp_path: Path) -> None:
    result = run_experiment(
        digits(federation={"rounds": 3, "clients_per_round": 3}, privacy=PRIVATE),
        out=tmp_path / "r",
    )
    privacy = json.loads((result.path / "privacy.json").read_text())
    assert len(privacy["clients"]) == 4
    spent = [client for client in privacy["clients"] if client["rounds"]]
    assert len({client["rounds"] for client in spent}) > 1, "the test wants unequal participation"
    for client in spent:
        assert client["epsilon"] <= 8.0
        assert client["epsilon_rdp"] >= client["epsilon"]
    exact, upper = (  # of one client: dp-accounting is slow
        dp_accounting_epsilon(spent[0]["ledger"], spent[0]["delta"], pessimistic=pessimistic)
        for pessimistic in (False, True)
    )
    assert upper - exact < 1e-2
    assert exact - 1e-9 <= spent[0]["epsilon"] <= exact + 1e-2
    assert privacy["system_epsilon"] == max(client["epsilon"] for client in privacy["clients"])


def test_an_epsilon_over_rounds_is_that_of_all_steps_together(tmp_path: Path) -> None:
    """Not the ε of the last round, which is what a fresh engine in every round would report."""
    result = run_experiment(digits(privacy=PRIVATE), out=tmp_path / "r")
    assert result.privacy is not None
    for spend in result.privacy.clients:
        assert (spend.rounds, spend.steps) == (3, 6)
        assert 7.9 < spend.epsilon <= 8.0, "the noise is calibrated to the whole run"
        accountant = PldAccountant()
        accountant.compose(PoissonSampled(spend.sampling_rate, Gaussian(spend.noise_multiplier)), 6)
        assert spend.epsilon == pytest.approx(accountant.get_epsilon(1e-3), abs=1e-2)


def test_running_twice_gives_identical_bytes(tmp_path: Path) -> None:
    """The second time from the experiment that the first run recorded."""
    experiment = digits(federation={"rounds": 9, "clients_per_round": 3})
    first = run_experiment(experiment, overrides=["federation.rounds=2"], out=tmp_path / "a")
    again = run_experiment(first.path / "experiment.yaml", out=tmp_path / "b")
    other = run_experiment(
        first.path / "experiment.yaml", overrides={"seed": 1}, out=tmp_path / "c"
    )
    for name in ("model.safetensors", "ledger.jsonl", "privacy.json", "clients.csv"):
        assert (first.path / name).read_bytes() == (again.path / name).read_bytes(), name
    assert model_of(first)["1.weight"].tobytes() != model_of(other)["1.weight"].tobytes()


def test_the_run_directory_holds_what_it_promises(tmp_path: Path) -> None:
    result = fedsim.run(digits(), out=tmp_path / "r")
    names = {
        str(path.relative_to(result.path)) for path in result.path.rglob("*") if path.is_file()
    }
    assert names == {
        "experiment.yaml",
        "rounds.jsonl",
        "privacy.json",
        "ledger.jsonl",
        "releases.jsonl",
        "scores.json",
        "clients.csv",
        "summary.json",
        "report.html",
        "model.safetensors",
        "checkpoint/inputs.json",
        "checkpoint/model.safetensors",
        "environment.json",
        "manifest.json",
    }
    rows = [json.loads(text) for text in (result.path / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {"test_loss", "test_accuracy", "seconds", "withdrawn"} <= set(row)
        assert set(row["timeline"]) == {"sample", "train", "aggregate", "evaluate", "account"}
        assert sum(row["timeline"].values()) == pytest.approx(row["seconds"], rel=0.1, abs=0.01)
        assert row["participants"] == [0, 1, 2, 3]
        assert row["failed"] == []
    assert rows[0]["epsilon_max"] < rows[1]["epsilon_max"] < rows[2]["epsilon_max"]
    summary = json.loads((result.path / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["test_accuracy"] == rows[-1]["test_accuracy"] == result.metrics["test_accuracy"]
    assert summary["epsilon"]["max"] == rows[-1]["epsilon_max"]
    assert summary["delta"] == 1e-3
    csv = (result.path / "clients.csv").read_text().splitlines()
    assert csv[0].startswith("client,examples,delta,epsilon,epsilon_rdp")
    assert len(csv) == 5
    environment = json.loads((result.path / "environment.json").read_text())
    assert environment["seed"] == 0
    assert environment["packages"]["torch"]


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="never overwritten"):
        run_experiment(digits(), out=tmp_path / "r")
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["thesis.txt"]


def test_a_wrong_experiment_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(fedsim.ExperimentError):
        run_experiment(digits(), overrides={"federation.rounds": 0}, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_without_privacy_no_epsilon_is_claimed(tmp_path: Path) -> None:
    result = run_experiment(digits(privacy=None), out=tmp_path / "r")
    assert result.privacy is None
    privacy = json.loads((result.path / "privacy.json").read_text())
    assert privacy["private"] is False
    assert privacy["system_epsilon"] is None
    assert (result.path / "ledger.jsonl").read_text() == ""
    assert all(row["epsilon_max"] is None for row in result.rounds)


def test_no_noise_is_an_infinite_epsilon(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 0.0, "delta": 1e-3, "max_grad_norm": 0.5}
    result = run_experiment(digits(privacy=privacy), out=tmp_path / "r")
    assert result.privacy is not None
    assert math.isinf(result.privacy.system_epsilon)
    content = json.loads((result.path / "privacy.json").read_text())
    assert content["private"] is False
    assert content["system_epsilon"] is None
    assert "infinite" in content["statement"]


def test_add_remove_keeps_client_sizes_out_of_everything_public(tmp_path: Path) -> None:
    privacy = {**NOISE, "adjacency": {"name": "add_remove", "declared_examples": 300}}
    result = run_experiment(digits(privacy=privacy), out=tmp_path / "r")
    assert result.privacy is not None
    sizes = {len(c) for c in loaded(digits(privacy=privacy), tmp_path).data.clients}
    assert len(sizes) > 1
    assert {spend.examples for spend in result.privacy.clients} == {300}
    assert {spend.sampling_rate for spend in result.privacy.clients} == {32 / 300}
    assert len({spend.noise_multiplier for spend in result.privacy.clients}) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling": "shuffle"}, "cut from shuffled data, without amplification by sampling"),
        ({"sampling": "balls_and_bins"}, "allocated every example to one batch at random"),
        ({"sampling": "fixed_size", "adjacency": "replace_one"}, "drawn without replacement"),
        ({"adjacency": "replace_one"}, "replace-one adjacency: one example is replaced by another"),
        ({"clipping": {"name": "per_layer", "noise_allocation": "optimal"}}, "by Poisson sampling"),
        ({"clipping": "automatic"}, "against anyone who knows the seed"),
        ({"noise": "secure"}, "from the operating system's random number generator"),
    ],
)
def test_every_way_to_draw_and_clip_keeps_the_target(
    tmp_path: Path, settings: Mapping, said: str
) -> None:
    experiment = digits(
        data={"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},  # of one size
        local={"steps": 2, "batch_size": 128, "optimizer": {"name": "sgd", "lr": 0.5}},
        privacy={**PRIVATE, **settings},
    )
    result = run_experiment(experiment, out=tmp_path / "r")
    assert result.privacy is not None
    assert said in result.privacy.statement
    for spend in result.privacy.clients:
        assert spend.steps == 2 * spend.rounds
        assert spend.epsilon <= 8.0
        assert result.rounds[-1]["epsilon_max"] == result.privacy.system_epsilon


def test_shuffled_epochs_are_charged_once_over_rounds(tmp_path: Path) -> None:
    """More batches in an epoch than steps in the run: every client has begun one epoch, not six."""
    local = {"steps": 2, "batch_size": 2, "optimizer": {"name": "sgd", "lr": 0.5}}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, "sampling": "shuffle"}
    result = run_experiment(digits(local=local, privacy=privacy), out=tmp_path / "r")
    assert result.privacy is not None
    for spend in result.privacy.clients:
        assert spend.examples > 12
        assert [count for _, count in spend.ledger.entries] == [1]
        assert spend.steps == 6


def break_training(monkeypatch: pytest.MonkeyPatch, fails: Callable[[StreamKey], bool]) -> None:
    """Let training raise for some (client, round), after the charge and before the reply."""
    train = client_round.block_of

    def faulty(*arguments: Any, **options: Any) -> Any:
        if any(member is not None and fails(member.key) for member in arguments[-1]):
            raise RuntimeError("the disk of some client is full")
        return train(*arguments, **options)

    monkeypatch.setattr(client_round, "block_of", faulty)


def test_a_failed_client_stays_charged_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fails in round 2; of another no reply ever arrives."""
    break_training(
        monkeypatch, lambda key: key.client == 3 or (key.client, key.round_number) == (2, 2)
    )
    result = run_experiment(digits(), out=tmp_path / "r")
    failure, other = result.rounds[1]["failed"]
    assert (failure["client"], other["client"]) == (2, 3)
    assert failure["reason"].startswith("RuntimeError at test_federation.py:")
    assert "disk" not in failure["reason"]  # the text could quote an example
    assert result.rounds[1]["participants"] == [0, 1]
    assert result.rounds[2]["participants"] == [0, 1, 2]
    assert result.privacy is not None
    assert [spend.steps for spend in result.privacy.clients] == [6, 6, 6, 6]


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, stop_after: Callable[[int], RunCallback]
) -> None:
    result = fedsim.run(digits(privacy=None), out=tmp_path / "r", callback=stop_after(2))
    assert result.status == "interrupted"
    assert len(result.rounds) == 2
    assert (result.path / "report.html").exists()
    assert json.loads((result.path / "summary.json").read_text())["status"] == "interrupted"


def test_dp_and_plain_arms_share_data_start_and_participants(tmp_path: Path) -> None:
    one, other = loaded(digits(), tmp_path), loaded(digits(privacy=None), tmp_path)
    for a, b in zip(one.data.clients, other.data.clients, strict=True):
        np.testing.assert_array_equal(a.features, b.features)
    for a, b in zip(one.model.module.parameters(), other.model.module.parameters(), strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())
    assert one.plan.participation == other.plan.participation
