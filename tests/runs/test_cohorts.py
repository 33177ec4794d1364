"""Clients that train together: the planned blocks, and what may not depend on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.clients import client_round
from fedsim.clients.app import BatchClientApp
from fedsim.clients.gradients.choice import training_gradients
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.training.member import BlockResult, StepCallback, StreamKey
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.runs.runner import run_experiment

PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}
OWN = {"1": {"max_grad_norm": 1.5}, "3": {"noise_multiplier": 0.7}}


def experiment(**sections: object) -> dict[str, Any]:
    partition = {"scheme": "dirichlet", "num_clients": 7, "alpha": 0.5, "min_examples": 20}
    content: dict[str, Any] = {
        "name": "together",
        "data": {"dataset": "digits", "partition": partition},
        "model": {"name": "mlp", "args": {"hidden": [41]}},
        "federation": {"rounds": 2, "clients_per_round": 6},
        "local": {"steps": 2, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}},
        "privacy": {**PRIVACY, "clients": OWN},
        **sections,
    }
    return content


def outcome(path: Path) -> tuple[bytes, list[str], list[Any]]:
    """The model's bytes, the ledger's lines and what each round says, times apart."""
    lines = (path / "rounds.jsonl").read_text().splitlines()
    said = [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "timeline")}
        for line in lines
    ]
    ledger = path / "ledger.jsonl"
    charges = sorted(ledger.read_text().splitlines()) if ledger.exists() else []
    return (path / "model.safetensors").read_bytes(), charges, said


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[StreamKey, Any]]:
    """Collect the values of every block that trains: of each planned member that is present."""
    blocks: list[dict[StreamKey, Any]] = []
    train = client_round.block_of

    def collect(*arguments: Any, **options: Any) -> Any:
        block, members = train(*arguments, **options), arguments[-1]
        whole = block.train

        def training(on_step: StepCallback | None = None) -> BlockResult:
            result = whole(on_step)
            found = zip(members, result.values, strict=True)
            blocks.append({one.key: values.clone() for one, values in found if one is not None})
            return result

        block.train = training
        return block

    monkeypatch.setattr(client_round, "block_of", collect)
    return blocks


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"privacy": {**PRIVACY, "clipping": "per_layer", "sampling": "shuffle"}},
        {"privacy": None},
    ],
    ids=["private", "by layer", "plain"],
)
def test_the_size_of_cohorts_changes_no_charge_and_the_model_by_rounding(
    tmp_path: Path,
    sections: dict[str, object],
    trained: list[dict[StreamKey, Any]],
    assert_close_runs: Callable[[Path, Path], None],
) -> None:
    largest: dict[str | int, int] = {"off": 1, "auto": 4} | ({} if sections else {2: 2})
    for vectorized_clients, most in largest.items():
        trained.clear()
        out = tmp_path / str(vectorized_clients)
        run_experiment(
            experiment(**sections),
            overrides={"local.vectorized_clients": vectorized_clients},
            out=out,
        )
        sizes = [len(block) for block in trained]
        assert (sum(sizes), max(sizes)) == (12, most), "in 2 rounds of 6 clients"
        assert_close_runs(tmp_path / "off", out)


@pytest.mark.parametrize("privacy", [PRIVACY, None], ids=["private", "plain"])
def test_a_large_cohort_trains_as_its_clients_alone(
    tmp_path: Path,
    privacy: dict[str, Any] | None,
    assert_close_runs: Callable[[Path, Path], None],
) -> None:
    for vectorized_clients in ("off", 80):
        content = experiment(
            data={"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 80}},
            federation={"rounds": 1},
            privacy=privacy,
        )
        overrides = {"local.vectorized_clients": vectorized_clients}
        run_experiment(content, overrides=overrides, out=tmp_path / str(vectorized_clients))
    assert_close_runs(tmp_path / "off", tmp_path / "80")


@pytest.mark.parametrize("privacy", [PRIVACY, None], ids=["private", "plain"])
def test_a_client_that_failed_changes_no_bit_of_its_block(
    tmp_path: Path, privacy: dict[str, Any] | None, trained: list[dict[StreamKey, Any]]
) -> None:
    """Failed before its charge, and after it; the blocks of the round are the planned ones."""
    content = experiment(privacy=privacy, federation={"rounds": 1})
    run_experiment(content, out=tmp_path / "whole")
    whole = {key: values for block in trained for key, values in block.items()}
    assert [len(block) for block in trained] == [3, 4]
    trained.clear()
    kinds = {1: "dropout_before", 4: "dropout_after"}
    faults = [{"kind": kind, "clients": [k], "rounds": [1]} for k, kind in kinds.items()]
    run_experiment({**content, "faults": faults}, out=tmp_path / "failed")
    rest = {key: values for block in trained for key, values in block.items()}
    assert sorted(key.client for key in rest) == [0, 2, 3, 5, 6]
    for key, values in rest.items():
        assert torch.equal(values, whole[key]), key


def test_the_shape_of_tiles_is_planned_whoever_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 4 has the longest batches of its block, and fails."""
    shapes: list[tuple[int, int | None]] = []
    train = client_round.block_of

    def looking(*arguments: Any, **options: Any) -> Any:
        shapes.append((len(arguments[-1]), options["rows"]))
        return train(*arguments, **options)

    monkeypatch.setattr(client_round, "block_of", looking)
    content = experiment(federation={"rounds": 1})
    size = assemble(load_experiment(content), ledger=None).data.clients.size(4)
    content["privacy"] = {**PRIVACY, "clients": {"4": {"sampling_rate": 31 / size}}}
    content["faults"] = [{"kind": "dropout_before", "clients": [4], "rounds": [1]}]
    plans = assemble(load_experiment(content), ledger=None).plan.clients or ()
    rows = [plan.release_as(DpSgdMechanism).padded_rows for plan in plans]
    assert rows[4] > max(rows[3], rows[5], rows[6])
    run_experiment(content, out=tmp_path / "r")
    assert shapes == [(3, max(rows[:3])), (4, rows[4])]


ALONE = [range(client, client + 1) for client in range(7)]


@pytest.mark.parametrize(
    ("vectorized_clients", "ranges"), [("off", ALONE), (4, [range(3), range(3, 7)])]
)
def test_answers_of_a_cohort_come_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vectorized_clients: str | int,
    ranges: list[range],
) -> None:
    seen: list[int] = []
    answer_requests = BatchClientApp.answer_requests

    def looking(*arguments: Any) -> Any:
        for group in answer_requests(*arguments):
            answers = list(group)
            seen.append(len(answers))
            yield answers

    monkeypatch.setattr(BatchClientApp, "answer_requests", looking)
    run_experiment(
        experiment(), overrides={"local.vectorized_clients": vectorized_clients}, out=tmp_path / "r"
    )
    rounds = [row["participants"] for row in outcome(tmp_path / "r")[2]]
    members = [sum(client in own for client in asked) for asked in rounds for own in ranges]
    assert seen == [size for size in members if size]


def test_a_cohort_that_breaks_costs_nobody_their_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client trains in its planned block with the others absent: the same bits."""
    run_experiment(experiment(), out=tmp_path / "whole")
    train = client_round.block_of

    def broken(*arguments: Any, **options: Any) -> Any:
        if sum(member is not None for member in arguments[-1]) > 1:
            raise RuntimeError("out of memory")
        return train(*arguments, **options)

    monkeypatch.setattr(client_round, "block_of", broken)
    run_experiment(experiment(), out=tmp_path / "broken")
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_every_charge_of_a_cohort_is_on_disk_before_any_of_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, seen = client_round.block_of, []

    def looking(*arguments: Any, **options: Any) -> Any:
        seen.append(len((tmp_path / "r" / "ledger.jsonl").read_text().splitlines()))
        return train(*arguments, **options)

    monkeypatch.setattr(client_round, "block_of", looking)
    run_experiment(experiment(), out=tmp_path / "r")
    assert seen == [6, 6, 12, 12]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def can_stack(model: nn.Module, *, private: bool) -> bool:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 8, generator=generator), torch.arange(20) % 3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    found = training_gradients(model, cross_entropy, x[:3], y[:3], private=private)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    return found is not None and found.stacks


def net(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 21), *between, nn.Linear(21, 3))


class Scaled(nn.Module):
    """Reads a parameter of another layer without a gradient: a block would read the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer.weight.detach().norm()


@pytest.mark.parametrize("private", [True, False])
def test_models_train_together_only_where_each_client_gets_its_own_gradients(
    private: bool,
) -> None:
    for between in (nn.ReLU(), nn.Tanh(), nn.GELU(), nn.SiLU(), nn.GroupNorm(3, 21)):
        assert can_stack(net(between), private=private)
    assert not can_stack(net(nn.Dropout(0.2)), private=private), "one stream for all clients"
    assert not can_stack(Scaled(), private=private)


def test_a_model_that_couples_examples_trains_alone() -> None:
    coupled = nn.BatchNorm1d(21, track_running_stats=False)
    assert not can_stack(net(coupled), private=False)
    assert not can_stack(net(nn.BatchNorm1d(21)), private=False)
