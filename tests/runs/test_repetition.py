"""A repetition is the same bits or a new charge: no two answers share noise and differ."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

import fedsim
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients import client_round
from fedsim.clients.app import BatchClientApp
from fedsim.experiment import load_experiment
from fedsim.federation import federation as federation_module
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.protocol.arrays import digest, to_arrays
from fedsim.protocol.errors import NOISE_REUSE
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainReply, TrainRequest
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.runner import RunFailedError, run_experiment

PLUGIN = """
import numpy as np
import torch


def load(seed=0):
    rng = np.random.default_rng(0)
    return rng.standard_normal((60, 4)).astype(np.float32), rng.integers(0, 3, 60)


def build(width=5):
    first, last = torch.nn.Linear(4, width), torch.nn.Linear(width, 3)
    return torch.nn.Sequential(first, torch.nn.Tanh(), last)


def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
"""
CLIENTS = 3


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "p.py").write_text(PLUGIN)
    return tmp_path


def experiment() -> dict[str, Any]:
    partition = {"scheme": "iid", "num_clients": CLIENTS}
    return {
        "name": "again",
        "data": {"dataset": "./p.py:load", "partition": partition},
        "model": {"name": "./p.py:build", "loss": "./p.py:loss"},
        "federation": {"rounds": 3},
        "local": {"steps": 2, "batch_size": 8},
        "privacy": {
            **{"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
            **{"clipping": {"name": "adaptive", "count_noise": 4.0}},
        },
    }


def federation(base: Path, overrides: Mapping[str, object] | None = None) -> Federation:
    loaded = load_experiment(experiment(), base=base, overrides=dict(overrides or {}))
    return assemble(loaded, ledger=base / "ledger.jsonl")


def answer(
    of: Federation,
    arrays: ArrayRecord,
    *,
    bound: float | None = None,
    block: tuple[int, ...] = (0, 1),
) -> Message:
    """Ask client 0 for round 1; its state is lost, so the ledger alone remembers."""
    with server_identity(1):
        message = TrainRequest(1, arrays, clip_norm=bound).to_message(7)
        app = BatchClientApp(of.client_task, block_of=lambda round_number, client: block)
        return app(message, Context(1, 7, {"partition-id": 0}, RecordDict(), {}))


Attack = Callable[[Path, ArrayRecord, pytest.MonkeyPatch], Message]


def other_model(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
    values = {name: array.numpy().copy() for name, array in arrays.items()}
    next(iter(values.values())).flat[0] += np.float32(2.0**-20)
    return answer(federation(base), to_arrays(values))


def other_bound(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
    return answer(federation(base), arrays, bound=0.4)


def other_block(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
    return answer(federation(base), arrays, block=(0, 2))


def other_size_of_block(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
    return answer(federation(base), arrays, block=(0,))


def one_example_changed(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
    changed = federation(base)
    examples = changed.data.clients[0]
    features = examples.features.copy()
    features[0] += 1.0

    class Changed:
        def __getitem__(self, client: int) -> Any:
            return type(examples)(features, examples.targets)

    patch.setattr(changed._tensors, "_clients", Changed())
    return answer(changed, arrays)


def edited(old: str, new: str) -> Attack:
    def attack(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
        assert old in PLUGIN
        (base / "p.py").write_text(PLUGIN.replace(old, new))
        return answer(federation(base), arrays)

    return attack


def setting(key: str, value: object) -> Attack:
    def attack(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
        return answer(federation(base, {key: value}), arrays)

    return attack


def other_version(package: Any) -> Attack:
    def attack(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
        patch.setattr(package, "__version__", "99.0")
        return answer(federation(base), arrays)

    return attack


def other_device(base: Path, arrays: ArrayRecord, patch: pytest.MonkeyPatch) -> Message:
    patch.setattr(federation_module, "device_kind", lambda device: "cuda NVIDIA H100")
    return answer(federation(base), arrays)


ATTACKS: dict[str, Attack] = {
    "global model": other_model,
    "clipping bound": other_bound,
    "members of the block": other_block,
    "size of the block": other_size_of_block,
    "one example": one_example_changed,
    "loss": edited('reduction="none")', 'reduction="none") * 2.0'),
    "loss, equal results": edited("outputs, targets", "outputs,  targets"),
    "model": edited("Tanh", "Sigmoid"),
    "data set": edited("default_rng(0)", "default_rng(1)"),
    "local.optimizer": setting("local.optimizer", {"name": "sgd", "lr": 0.7}),
    "local.steps": setting("local.steps", 3),
    "local.batch_size": setting("local.batch_size", 9),
    "privacy.noise_multiplier": setting("privacy.noise_multiplier", 2.0),
    "privacy.max_grad_norm": setting("privacy.max_grad_norm", 1.5),
    "privacy.sampling": setting("privacy.sampling", "balls_and_bins"),
    "fedsim": other_version(fedsim),
    "torch": other_version(torch),
    "numpy": other_version(np),
    "device": other_device,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_two_answers_share_noise_and_differ(
    name: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = federation(base)
    arrays = begun.initial_arrays()
    first = TrainReply.from_message(answer(begun, arrays))
    second = ATTACKS[name](base, arrays, monkeypatch)
    assert second.has_error(), "another answer under the same noise"
    assert second.error.code == NOISE_REUSE
    assert "would reuse its noise: resume with what the run began with" in (
        second.error.reason or ""
    )
    assert len(FileJournal(base / "ledger.jsonl").history(0)) == 1
    monkeypatch.undo()
    again = TrainReply.from_message(answer(begun, arrays))
    assert digest(to_arrays(again.arrays)) == digest(to_arrays(first.arrays)), (
        "the same digest, the same bytes"
    )
    assert (again.spend, again.clip_norm) == (first.spend, first.clip_norm)


@pytest.mark.parametrize("name", ["nothing", "global model", "loss", "fedsim"])
def test_under_secure_noise_every_answer_is_charged(
    name: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"privacy.noise": "secure"}
    begun = federation(base, overrides)
    arrays = begun.initial_arrays()
    first = TrainReply.from_message(answer(begun, arrays))
    if name == "global model":
        values = {key: array.numpy() * np.float32(0.5) for key, array in arrays.items()}
        arrays = to_arrays(values)
    if name == "loss":
        (base / "p.py").write_text(PLUGIN.replace('"none")', '"none") * 2.0'))
    if name == "fedsim":
        monkeypatch.setattr(fedsim, "__version__", "99.0")
    second = TrainReply.from_message(answer(federation(base, overrides), arrays))
    assert digest(to_arrays(first.arrays)) != digest(to_arrays(second.arrays))
    assert second.spend is not None
    assert second.spend.rounds == 2
    assert len(FileJournal(base / "ledger.jsonl").history(0)) == 2


def test_under_secure_noise_a_repeated_round_pays_for_a_new_epoch(base: Path) -> None:
    """The division of the first answer is gone, so the second answer divides the examples anew."""
    overrides = {"privacy.noise": "secure", "privacy.sampling": "balls_and_bins"}
    arrays = federation(base).initial_arrays()
    spends = [
        TrainReply.from_message(answer(federation(base, overrides), arrays)).spend for _ in range(2)
    ]
    counts = [sum(n for _, n in spend.ledger.entries) for spend in spends if spend is not None]
    assert len(counts) == 2
    assert counts[1] == 2 * counts[0] > 0


def test_under_secure_noise_the_record_tells_nothing_of_the_examples(base: Path) -> None:
    """The seed of such a run need not be secret, so no key protects a digest of examples."""
    here = federation(base, {"privacy.noise": "secure"})
    task = here.client_task(0)
    request = TrainRequest(1, here.initial_arrays())
    one = task.request_digest(request, (0, 1), "model")
    here._tensors._digests[0] = b"of other examples"
    assert task.request_digest(request, (0, 1), "model") == one
    seeded = federation(base)
    one = seeded.client_task(0).request_digest(request, (0, 1), "model")
    seeded._tensors._digests[0] = b"of other examples"
    assert seeded.client_task(0).request_digest(request, (0, 1), "model") != one


def test_a_run_that_changed_in_mid_round_ends_with_the_way_out(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first client was charged before the power cut. The run ends, charges nobody else,
    and goes on with the version that it began with. An edited plug-in is refused before a round.
    """
    train, calls = client_round.block_of, []

    def power_cut(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == CLIENTS + 1:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    alone = {"local.vectorized_clients": "off"}
    with monkeypatch.context() as patch:
        patch.setattr(client_round, "block_of", power_cut)
        patch.setattr(client_round, "MAX_CHARGED_CLIENTS", 1)
        run_experiment(experiment(), base=base, overrides=alone, out=base / "r")
    lines = (base / "r" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 1, 1, 2]
    (base / "p.py").write_text(PLUGIN.replace('"none")', '"none") * 2.0'))
    with pytest.raises(RunDirectoryError, match=r"the plug-in file p\.py changed since the run"):
        run_experiment(experiment(), base=base, overrides=alone, out=base / "r", resume=True)
    (base / "p.py").write_text(PLUGIN)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        with pytest.raises(RunFailedError, match=r"round 2: client 0 .* another seed") as end:
            run_experiment(experiment(), base=base, overrides=alone, out=base / "r", resume=True)
    assert end.value.exit_code == 1
    result = run_experiment(experiment(), base=base, overrides=alone, out=base / "r", resume=True)
    assert result.status == "completed"
