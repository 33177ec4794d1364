"""Whole runs with server optimizers, averages and own strategies: resumed, replayed, in secret."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from safetensors.numpy import load_file

from fedsim.cli import cli
from fedsim.experiment import load_experiment
from fedsim.planning.validation import find_footprint
from fedsim.protocol.arrays import to_numpy
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunFailedError, run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tools.replay import replay_run

ADAM = {"name": "fedadam", "server_lr": 0.05}
PRIVACY = {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5}
OWN = """
import numpy as np
from fedsim.algorithms.algorithm import Algorithm

class Last(Algorithm):
    takes_weights = False

    def init(self, state):
        return state.with_memory({"rounds": np.asarray(0)})

    def server(self, state, update):
        rounds = state.memory["rounds"] + 1
        if rounds > 5:
            raise ValueError("no more than five")
        return state.with_model(update.mean).with_memory({"rounds": rounds})
"""


def experiment(**federation: Any) -> dict[str, Any]:
    return {
        "name": "strategies",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 3, **federation},
        "local": {"steps": 1, "batch_size": "full", "optimizer": {"name": "sgd", "lr": 1.0}},
        "privacy": PRIVACY,
    }


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, stop_after: Any) -> None:
    settings = experiment(strategy=ADAM, ema_decay=0.8)
    whole = run_experiment(settings, out=tmp_path / "whole")
    part = run_experiment(settings, out=tmp_path / "part", callback=stop_after(2))
    assert part.status == "interrupted"
    again = run_experiment(settings, out=tmp_path / "part", resume=True)
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (whole.path / name).read_bytes() == (again.path / name).read_bytes(), name
    assert verify_run(RunDirectory(again.path)).problems == ()
    assert replay_run(RunDirectory(again.path)).problems == ()


def test_the_saved_and_evaluated_model_is_the_average_of_the_iterates(tmp_path: Path) -> None:
    """Clients go on from the last iterate, so the iterates are those of a run without averaging."""
    averaged = run_experiment(experiment(ema_decay=0.8), out=tmp_path / "averaged")
    iterates = []
    for rounds in (1, 2, 3):
        plain = run_experiment(
            experiment(rounds=rounds),
            out=tmp_path / str(rounds),
            overrides={"privacy.target_epsilon": None, "privacy.noise_multiplier": noise(averaged)},
        )
        iterates.append(load_file(plain.path / "model.safetensors"))
    weights = np.array([0.64, 0.8, 1.0])
    saved = load_file(averaged.path / "model.safetensors")
    for name, value in saved.items():
        expected = sum(
            w * one[name].astype(float) for w, one in zip(weights, iterates, strict=True)
        )
        np.testing.assert_allclose(value, expected / weights.sum(), rtol=1e-5, atol=1e-7)
    checkpoint = RunDirectory(averaged.path).read_checkpoint()
    assert checkpoint is not None
    last = to_numpy(checkpoint.state.arrays)
    for name, value in iterates[-1].items():
        np.testing.assert_allclose(last[name], value, rtol=1e-5, atol=1e-7)
    assert averaged.rounds[-1]["test_accuracy"] == averaged.metrics["test_accuracy"]


def noise(run: Any) -> float:
    assert run.privacy is not None
    return run.privacy.clients[0].noise_multiplier


@pytest.mark.slow
def test_secure_sums_take_the_same_steps(tmp_path: Path) -> None:
    settings = experiment(strategy=ADAM, ema_decay=0.5)
    plain = run_experiment(settings, out=tmp_path / "plain")
    secret = run_experiment(
        {**settings, "secure_aggregation": {"protocol": "additive"}}, out=tmp_path / "secret"
    )
    assert (plain.path / "clients.csv").read_text() == (secret.path / "clients.csv").read_text()
    for name, value in load_file(plain.path / "model.safetensors").items():
        found = load_file(secret.path / "model.safetensors")[name]
        np.testing.assert_allclose(found, value, atol=1e-3)


def test_an_own_strategy_is_part_of_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = experiment(strategy="./own.py:Last", weighting="examples")
    loaded = load_experiment(settings, base=tmp_path)
    assert loaded.experiment.plugins == ("./own.py:Last",)
    assert find_footprint(loaded).code == ("./own.py:Last",)
    run = run_experiment(settings, base=tmp_path, out=tmp_path / "run")
    (tmp_path / "own.py").write_text(OWN + "# edited\n")
    found = run_experiment(
        experiment(), base=tmp_path, out=tmp_path / "fedavg"
    )  # equal weights, as the strategy takes none
    same = [load_file(one.path / "model.safetensors") for one in (run, found)]
    for name, value in same[0].items():
        np.testing.assert_array_equal(value, same[1][name])


def test_a_strategy_without_weights_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = experiment(strategy="./own.py:Last", weighting="examples_over_noise", rounds=1)
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(
        cli, ["run", str(tmp_path / "e.yaml"), "--out", str(tmp_path / "r")]
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.stderr.split())
    assert (
        "federation.weighting: examples_over_noise is ignored, as the strategy ./own.py:Last "
        "takes no" in text
    )


def test_a_strategy_that_fails_in_a_round_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("rounds > 5", "rounds > 2"))
    with pytest.raises(RunFailedError, match=r"strategy failed with ValueError: no more"):
        run_experiment(experiment(strategy="./own.py:Last"), base=tmp_path, out=tmp_path / "run")
