"""Central trust: the server's noise on exact sums, in clear, in secure sums, and after a crash."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.accountant import Gaussian, PldAccountant, PoissonSampled
from fedsim.accountant.ledger.journal import FileJournal
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.server.aggregation import noisy_sum
from fedsim.tools.replay import replay_run

EXPERIMENT: dict[str, Any] = {
    "name": "central",
    "seed": 5,
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 4, "alpha": 1.0, "min_examples": 20},
    },
    "model": {"name": "mlp", "args": {"hidden": [50]}},  # a larger one is probed in fewer rounds
    "federation": {"rounds": 3},
    "local": {"steps": 1, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 1.0, "trust": "central"},
}


def run(out: Path, *, resume: bool = False, **overrides: Any) -> Any:
    return run_experiment(EXPERIMENT, overrides=overrides, out=out, resume=resume)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("central") / "r")


def model_of(result: Any) -> bytes:
    return b"".join(value.numpy().tobytes() for value in result.model().state_dict().values())


@pytest.mark.slow
def test_plain_and_secure_sums_give_the_same_bits(plain: Any, tmp_path: Path) -> None:
    secure = {"protocol": "additive", "aggregators": 2, "min_clients": 3}
    sealed = run(tmp_path / "secure", secure_aggregation=secure)
    assert model_of(plain) == model_of(sealed)
    assert plain.privacy.system_epsilon == sealed.privacy.system_epsilon <= 4.0


@pytest.mark.slow
def test_each_client_is_charged_for_the_noise_of_the_sum(plain: Any) -> None:
    journal = FileJournal(plain.path / "ledger.jsonl")
    for client in range(4):
        charges = journal.history(client)
        assert [charge.round_number for charge in charges] == [1, 2, 3]
        ((event, count),) = charges[-1].ledger.entries
        assert count == 1
        assert isinstance(event, PoissonSampled)
        assert isinstance(event.event, Gaussian)
        accountant = PldAccountant()
        accountant.compose(event, count=3)
        assert accountant.get_epsilon(delta=1e-3) <= 4.0


@pytest.mark.slow
def test_no_record_has_a_tag_of_an_upload(plain: Any) -> None:
    lines = (plain.path / "releases.jsonl").read_text().splitlines()
    assert [json.loads(line)["uploads"] for line in lines] == [{}] * 3
    opening = json.loads((plain.path / "checkpoint" / "opening.json").read_text())
    assert opening["round"] == 3
    assert opening["clients"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_is_computed_again_from_its_seed(plain: Any) -> None:
    found = replay_run(RunDirectory.open(plain.path))
    assert not found.problems
    assert found.rounds == 3


class _KilledError(Exception):
    """The process ended here."""


def killed_in_round(monkeypatch: pytest.MonkeyPatch, number: int, *, after_noise: bool) -> None:
    """Let the run die in a round, before or after the noise was drawn."""
    add_noise = noisy_sum.add_noise
    rounds: list[int] = []

    def dying(sums: Any, source: Any) -> Any:
        rounds.append(1)
        if len(rounds) == number and not after_noise:
            raise _KilledError
        drawn = add_noise(sums, source)
        if len(rounds) == number:
            raise _KilledError
        return drawn

    monkeypatch.setattr(noisy_sum, "add_noise", dying)


@pytest.mark.slow
@pytest.mark.parametrize("after_noise", [False, True])
def test_a_killed_run_resumes_to_the_same_bits_and_charges(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_noise: bool
) -> None:
    with monkeypatch.context() as patched:
        killed_in_round(patched, 2, after_noise=after_noise)
        with pytest.raises(_KilledError):
            run(tmp_path / "r")
    resumed = run(tmp_path / "r", resume=True)
    assert model_of(resumed) == model_of(plain)
    assert (tmp_path / "r" / "ledger.jsonl").read_bytes() == (
        plain.path / "ledger.jsonl"
    ).read_bytes()


CORRELATED = {
    "privacy": {
        **{"unit": "client", "max_update_norm": 1.0, "trust": "central", "delta": 1e-3},
        **{"target_epsilon": 8.0, "noise_correlation": "blt"},
    },
    "federation.participation": {"scheme": "min_separation"},
}


@pytest.mark.parametrize("overrides", [{}, CORRELATED], ids=["independent", "correlated"])
def test_another_client_set_of_a_round_that_had_noise_is_given_up(
    overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        killed_in_round(patched, 2, after_noise=True)
        with pytest.raises(_KilledError):
            run(tmp_path / "r", **overrides)
    opening = RunDirectory(tmp_path / "r").read_opening()
    assert opening is not None
    assert (opening.round_number, opening.clients) == (2, (0, 1, 2, 3))
    assert opening.digest
    add = noisy_sum.NoisySum.add

    def without_client_0(self: Any, client: int, answer: Any) -> None:
        if client == 0 and self._round_number == 2:
            raise noisy_sum.InvalidUpdateError("it broke down")
        add(self, client, answer)

    with monkeypatch.context() as patched:
        patched.setattr(noisy_sum.NoisySum, "add", without_client_0)
        resumed = run(tmp_path / "r", resume=True, **overrides)
    assert resumed.rounds[1]["participants"] == []
    assert "so the round is given up" in resumed.rounds[1]["failed"][1]["reason"]
    assert "so the round is given up" in resumed.rounds[1]["aborted"]
    assert resumed.rounds[1]["update_norm"] is None
    assert resumed.rounds[2]["participants"] == [0, 1, 2, 3]
    replay = replay_run(RunDirectory.open(resumed.path))
    assert (replay.rounds, replay.problems) == (3, ())


@pytest.mark.slow
def test_noise_of_the_operating_system_charges_a_repeated_round_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = {"privacy.noise": "secure", "privacy.target_epsilon": None}
    secure["privacy.noise_multiplier"] = 1.0
    with monkeypatch.context() as patched:
        killed_in_round(patched, 2, after_noise=True)
        with pytest.raises(_KilledError):
            run(tmp_path / "r", **secure)
    run(tmp_path / "r", resume=True, **secure)
    journal = FileJournal(tmp_path / "r" / "ledger.jsonl")
    assert [charge.round_number for charge in journal.history(0)] == [1, 2, 2, 3]


def test_a_strategy_that_looks_at_single_updates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from fedsim.algorithms.built_in.fedavg import FedAvg\n"
        "class Own(FedAvg):\n"
        "    uses_each_update = True\n"
    )
    own = {**EXPERIMENT, "federation": {"rounds": 1, "strategy": "./own.py:Own"}}
    with pytest.raises(ValueError, match="only sums may be used"):
        run_experiment(own, base=tmp_path, out=tmp_path / "r")
