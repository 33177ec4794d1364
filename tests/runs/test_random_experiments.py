"""Whatever an experiment combines, the promises of a run hold together.

Single tests cover each setting by itself; what goes wrong between them is found by experiments that
nobody would write down.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fedsim.core.errors import FedsimError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import RunResult, run_experiment
from fedsim.runs.verification import verify_run
from fedsim.tracking.callbacks import RunCallback

SAME = ("model.safetensors", "privacy.json", "clients.csv", "ledger.jsonl")
ADJACENCIES = {
    "poisson": ("zero_out", "add_remove", "replace_one"),
    "fixed_size": ("replace_one",),
    "shuffle": ("zero_out", "replace_one"),
    "balls_and_bins": ("zero_out", "add_remove", "replace_one"),
}
FAULTS = (
    "dropout_before", "dropout_during", "dropout_after", "empty", "error",
    "straggler", "nan", "inf", "wrong_shape",
)  # fmt: skip
OPTIMIZERS = (
    {"name": "sgd", "lr": 0.3},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"name": "adam", "lr": 0.01},
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
)
MODELS = (
    {"name": "logistic"},
    {"name": "mlp", "args": {"hidden": [8, 4]}},
    {"name": "cnn", "args": {"channels": [4], "hidden": 8}},
)


@st.composite
def privacy(draw: st.DrawFn, num_clients: int) -> dict[str, Any]:
    sampling = draw(st.sampled_from(sorted(ADJACENCIES)))
    budget = draw(
        st.sampled_from(
            [
                {"target_epsilon": 2.0},
                {"noise_multiplier": 1.0},
                {"noise_multiplier": 1.0, "target_epsilon": 3.0, "on_exhausted": "withdraw"},
                {"noise_multiplier": 2.0, "target_epsilon": 2.0, "on_exhausted": "stop"},
            ]
        )
    )
    section: dict[str, Any] = {
        **budget,
        "delta": draw(st.sampled_from(["auto", 1e-4])),
        "max_grad_norm": 0.5,
        "clipping": draw(st.sampled_from(["flat", "per_layer", "automatic", "adaptive"])),
        "sampling": sampling,
        "adjacency": draw(st.sampled_from(ADJACENCIES[sampling])),
        "accountant": draw(st.sampled_from(["pld", "rdp"])),
    }
    if section["adjacency"] == "add_remove":
        declared = draw(st.sampled_from([50, 300]))
        section["adjacency"] = {"name": "add_remove", "declared_examples": declared}
    if draw(st.booleans()):
        client = draw(st.integers(0, num_clients - 1))
        section["clients"] = {str(client): {"target_epsilon": 1.0}}
    return section


@st.composite
def faults(draw: st.DrawFn, num_clients: int, rounds: int) -> list[dict[str, Any]]:
    found = []
    for kind in draw(st.lists(st.sampled_from(FAULTS), max_size=3)):
        fault: dict[str, Any] = {"kind": kind, "probability": draw(st.sampled_from([0.3, 1.0]))}
        if kind == "straggler":
            fault["delay"] = draw(st.sampled_from([1.0, 20.0]))
        if draw(st.booleans()):
            fault["clients"] = [draw(st.integers(0, num_clients - 1))]
        if draw(st.booleans()):
            fault["rounds"] = [draw(st.integers(1, rounds))]
        found.append(fault)
    return found


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, Any]:
    clients, rounds = draw(st.sampled_from([2, 4, 7])), draw(st.sampled_from([2, 4]))
    federation: dict[str, Any] = {
        "rounds": rounds,
        "clients_per_round": draw(st.none() | st.integers(1, clients)),
        "deadline": 10.0,
        "min_participants": draw(st.sampled_from([0, 1])),
    }
    experiment: dict[str, Any] = {
        "name": "random",
        "seed": draw(st.integers(0, 99)),
        "data": {
            "dataset": "digits",
            "partition": {
                "scheme": draw(st.sampled_from(["iid", "dirichlet", "quantity"])),
                "num_clients": clients,
                "min_examples": draw(st.sampled_from([0, 5, 20])),
            },
        },
        "model": draw(st.sampled_from(MODELS)),
        "federation": federation,
        "local": {
            "steps": draw(st.sampled_from([1, 3])),
            "batch_size": draw(st.sampled_from([1, 16, 200])),
            "max_physical_batch": draw(st.sampled_from([None, None, 7])),
            "optimizer": draw(st.sampled_from(OPTIMIZERS)),
        },
        "privacy": draw(st.none() | privacy(clients) | privacy(clients)),
        "faults": draw(faults(clients, rounds)),
    }
    if draw(st.sampled_from([True, False, False])):
        protocol = draw(st.sampled_from(["additive", "quantized", "secagg", "secagg_plus"]))
        experiment["secure_aggregation"] = {
            "protocol": protocol,
            "min_clients": 2,
            "on_abort": draw(st.sampled_from(["raise", "skip_round"])),
        }
    return experiment


def examples(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test draw this many experiments and rounds to stop after."""
    drawn = settings(
        max_examples=number,
        deadline=None,
        derandomize=True,  # the same everywhere: to search further, take this out
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    given_both = given(experiment=experiments(), stop=st.integers(1, 3))
    return lambda test: drawn(given_both(test))


Stops = Callable[[int], RunCallback]
Charges = Callable[[Path], list[Any]]


@pytest.mark.slow
@examples(5)
def test_some_combinations_keep_the_promises_or_are_refused(
    stop_after: Stops, charges_of: Charges, tmp_path: Path, experiment: dict[str, Any], stop: int
) -> None:
    check_promises(stop_after, charges_of, tmp_path, experiment, stop)


@pytest.mark.long
@examples(100)
def test_every_combination_keeps_the_promises_or_is_refused(
    stop_after: Stops, charges_of: Charges, tmp_path: Path, experiment: dict[str, Any], stop: int
) -> None:
    check_promises(stop_after, charges_of, tmp_path, experiment, stop)


def check_promises(
    stop_after: Stops, charges_of: Charges, tmp_path: Path, experiment: dict[str, Any], stop: int
) -> None:
    """Cohorts change no charge, resuming no bit, ε is verified, and no budget is exceeded."""
    base = tmp_path / "runs"
    shutil.rmtree(base, ignore_errors=True)
    result = ended(experiment, base / "whole")
    if not (base / "whole" / "rounds.jsonl").exists():
        event("refused")
        assert result is None, "refused, and nothing was run"
        return
    ended(experiment, base / "alone", overrides={"local.vectorized_clients": "off"})
    assert charges_of(base / "whole") == charges_of(base / "alone")
    if experiment["privacy"]:
        assert verify_run(RunDirectory.open(base / "whole")).problems == ()
    event("failed" if result is None else result.status)
    if result is None or len(result.rounds) <= stop:
        return
    for spend in result.privacy.clients if result.privacy else ():
        if spend.target_epsilon is not None and spend.epsilon is not None:
            assert spend.epsilon <= spend.target_epsilon
    ended(experiment, base / "resumed", callback=stop_after(stop))
    ended(experiment, base / "resumed", resume=True)
    assert_same(base / "whole", base / "resumed")


def ended(experiment: dict[str, Any], out: Path, **options: Any) -> RunResult | None:
    """Run, and return None where the run failed or was refused in words of fedsim's own."""
    try:
        return run_experiment(experiment, out=out, **options)
    except FedsimError:
        return None


def assert_same(one: Path, other: Path) -> None:
    for name in SAME:
        assert content(one / name) == content(other / name), name
    assert rows(one) == rows(other)


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "rounds.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0, "timeline": {}} for line in lines]
