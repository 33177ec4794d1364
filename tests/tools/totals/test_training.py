"""Training files: the events of what code does, and what stands beside the authors' ε."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fedsim.accountant import (
    EpochShuffled,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    PrivacyLedger,
    RandomAllocation,
)
from fedsim.cli import cli
from fedsim.experiment import ExperimentError
from fedsim.tools.totals.sources import SourceError, read_source
from fedsim.tools.totals.totals import account_of
from fedsim.tools.totals.training import TrainingReport, read_training, report_of

TRAINING: dict[str, Any] = {
    "examples": 30,
    "batch_size": 4,
    "steps": 20,
    "sampling": "shuffle",
    "noise_multiplier": 2.0,
    "delta": 1e-3,
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Return a function that writes a training file with changed keys."""

    def written(claimed: object = None, name: str = "t.yaml", **changes: object) -> Path:
        training = {k: v for k, v in (TRAINING | changes).items() if v is not None}
        content = {"training": training} | ({} if claimed is None else {"claimed": claimed})
        path = tmp_path / name
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return written


def report(path: Path) -> TrainingReport:
    return report_of(path.name, read_training(path), ["pld"])


Z = Gaussian(2.0)


@pytest.mark.parametrize(
    ("changes", "event", "count"),
    [
        ({}, EpochShuffled(8, Z), 3),  # 2.5 passes, and a part of a pass is a release
        ({"drop_last": True}, EpochShuffled(7, Z), 3),
        ({"steps": None, "epochs": 1.5}, EpochShuffled(8, Z), 2),
        ({"sampling": "balls_and_bins"}, RandomAllocation(8, Z), 3),
        ({"sampling": "poisson"}, PoissonSampled(4 / 30, Z), 20),
        ({"sampling": "poisson", "sampling_rate": 0.125}, PoissonSampled(0.125, Z), 20),
        (
            {"sampling": "poisson", "sampling_rate": 0.02, "steps": None, "epochs": 15},
            PoissonSampled(0.02, Z),
            750,
        ),
        ({"sampling": "poisson", "steps": None, "epochs": 2}, PoissonSampled(4 / 30, Z), 15),
        (
            {"sampling": "fixed_size", "adjacency": "replace_one"},
            FixedSizeSampled(30, 4, Z),
            20,
        ),
        ({"sampling": "full_batch", "batch_size": None}, Z, 20),
        ({"sampling": "full_batch", "batch_size": 30, "noise_added_to": "mean"}, Gaussian(60), 20),
        ({"noise_added_to": "mean"}, EpochShuffled(8, Gaussian(8.0)), 3),
        ({"sensitivity": 4.0}, EpochShuffled(8, Gaussian(0.5)), 3),
    ],
)
def test_the_ledger_is_what_the_code_does(
    write: Any, changes: dict[str, Any], event: Event, count: int
) -> None:
    expected = PrivacyLedger().record(event, count)
    file = read_training(write(**changes))
    assert file.training.ledger().entries == expected.entries
    adjacency = file.training.adjacency
    rows = report_of("t", file).rows
    assert rows[0].epsilons == {
        name: expected.epsilon(1e-3, name, adjacency) for name in ("pld", "rdp")
    }


def test_rows_lead_from_the_code_to_the_account_of_the_authors(write: Any) -> None:
    claimed = {"epsilon": 0.5, "sampling": "poisson", "epochs": 1, "noise_multiplier": 3.0}
    found = report(write(claimed))
    assert [row.label for row in found.rows] == [
        "as the code does it",
        "as if sampling: poisson",
        "as if epochs: 1",
        "as if noise_multiplier: 3",
    ]
    expected = [
        PrivacyLedger().record(EpochShuffled(8, Z), 3),
        PrivacyLedger().record(PoissonSampled(4 / 30, Z), 20),
        PrivacyLedger().record(PoissonSampled(4 / 30, Z), 8),
        PrivacyLedger().record(PoissonSampled(4 / 30, Gaussian(3.0)), 8),
    ]
    assert [row.epsilons["pld"] for row in found.rows] == [e.epsilon(1e-3) for e in expected]


def test_shuffled_batches_stand_beside_poisson_samples_also_without_a_claim(write: Any) -> None:
    found = report(write())
    assert [row.label for row in found.rows] == ["as the code does it", "as if sampling: poisson"]
    assert any("no amplification is claimed for shuffled" in line for line in found.sentences())
    assert len(report(write(sampling="poisson")).rows) == 1
    last = report(write({"epsilon": 1, "steps": 10})).rows[-1]
    assert (last.label, last.training.steps) == ("as if sampling: poisson", 10)


def test_a_claim_holds_if_it_is_not_below_a_bound_of_the_code(write: Any) -> None:
    spent = report(write()).spent
    for epsilon, word in ((spent, "it holds"), (spent * 0.999, "it is not proven")):
        sentences = report(write({"epsilon": epsilon, "because": "of RDP"})).sentences()
        assert sentences[0].endswith(": of RDP")
        assert sentences[1].startswith(word)


def test_a_delta_that_allows_to_publish_an_example_is_named(write: Any) -> None:
    assert not any("is not below" in line for line in report(write(delta=0.03)).sentences())
    sentences = report(write(delta=0.034)).sentences()
    assert "δ = 0.034 is not below 1/30" in sentences[-2]


@pytest.mark.parametrize(
    ("claimed", "changes", "problem"),
    [
        (None, {"sampling": "shuffled"}, "t.yaml:5:3: training.sampling: must be one of"),
        (None, {"batchsize": 3}, "training.batchsize: unknown key; did you mean 'batch_size'?"),
        (None, {"steps": 1.5}, "t.yaml:4:3: training.steps: must be a whole number"),
        (None, {"noise_multiplier": 0}, "training.noise_multiplier: must be > 0"),
        (None, {"delta": None}, "t.yaml:1:1: training.delta: missing"),
        (None, {"epochs": 2}, "t.yaml:1:1: training: give one of steps and epochs"),
        (None, {"steps": None}, "t.yaml:1:1: training: give one of steps and epochs"),
        (
            None,
            {"sampling": "poisson", "sampling_rate": 1e-300, "steps": None, "epochs": 1e12},
            "training.epochs: are more than 1,000,000,000,000 steps",
        ),
        (None, {"batch_size": None}, "sampling: shuffle needs training.batch_size"),
        (None, {"batch_size": 31}, "t.yaml:3:3: training.batch_size: must be <= examples = 30"),
        (None, {"sampling": "full_batch"}, "full_batch has all 30 examples in each batch"),
        (None, {"sampling_rate": 0.1}, "sampling_rate: is for sampling: poisson"),
        (None, {"sampling": "poisson", "drop_last": True}, "drop_last: is for sampling: shuffle"),
        (None, {"adjacency": "add_remove"}, "t.yaml:5:3: training.sampling: sampling shuffle has"),
        ({}, {}, "claimed.epsilon: missing"),
        ({"epsilon": 1, "steps": 2, "epochs": 2}, {}, "claimed: give steps or epochs, not both"),
        ({"epsilon": 1, "sampling": "fixed_size"}, {}, "t.yaml:10:3: claimed.sampling: sampling"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    write: Any, claimed: object, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ExperimentError) as error:
        read_source(str(write(claimed, **changes)))
    assert problem in str(error.value)


def test_a_training_file_is_a_ledger_with_terms_of_its_own(write: Any) -> None:
    first, second = (read_source(str(write(name=f"{name}.yaml"))) for name in "ab")
    total = account_of([first, second])
    expected = PrivacyLedger().record(EpochShuffled(8, Z), 6)
    assert total.largest.epsilon == expected.epsilon(1e-3)
    assert (total.unit, total.adjacency, total.observer) == ("example", "zero_out", None)
    with pytest.raises(SourceError, match="holds under zero_out adjacency only"):
        account_of([first], adjacency="replace_one")
    for changes, problem in (
        ({"unit": "client"}, "unit 'example' and"),
        ({"adjacency": "replace_one"}, "adjacency 'zero_out'"),
        ({"delta": 1e-4}, "several δ"),
    ):
        with pytest.raises(SourceError, match=problem):
            account_of([first, read_source(str(write(name="c.yaml", **changes)))])


def test_the_command_prints_the_claim_and_json_is_a_ledger(write: Any, tmp_path: Path) -> None:
    path = write({"epsilon": 1, "sampling": "poisson"})
    run = CliRunner().invoke(cli, ["totals", str(path)], catch_exceptions=False)
    assert run.exit_code == 0
    assert "the authors say ε = 1\n" in run.stdout
    assert "largest ε" not in run.stdout
    run = CliRunner().invoke(cli, ["totals", str(path), "--json"], catch_exceptions=False)
    found = json.loads(run.stdout)
    rows = found["trainings"][0]["rows"]
    assert rows[0]["epsilons"]["pld"] == found["system_epsilon"] > rows[1]["epsilons"]["pld"]
    (tmp_path / "again.json").write_text(run.stdout)
    again = account_of([read_source(str(tmp_path / "again.json"))], delta=1e-3)
    assert again.largest.epsilon == found["system_epsilon"]
