"""Scores on the public test set: every round, in scores.json at the end, and checked by verify."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

import fedsim
from fedsim.data import Examples
from fedsim.data.load import ExampleGroups
from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.federation.public_scores import PublicScores
from fedsim.models.losses import resolve_loss
from fedsim.models.tasks import task_for
from fedsim.report.terminal import print_result
from fedsim.runs.directory import RunDirectory
from fedsim.runs.runner import run_experiment
from fedsim.runs.verification import verify_run

sk: Any = sklearn.metrics
RARE = """
import numpy as np
def load(seed=0):
    g = np.random.default_rng(3)
    x = g.normal(size=(600, 4)).astype(np.float32)
    return x, np.where(g.random(600) < 0.05, "ill", "healthy")
def two(outputs, targets):
    return 2
"""
PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}


def experiment(**sections: Any) -> dict[str, Any]:
    return {
        "name": "rare",
        "data": {"dataset": "./d.py:load", "partition": {"scheme": "iid", "num_clients": 2}},
        "model": {"name": "logistic", "args": {"init": "zeros"}},
        "federation": {"rounds": 3},
        "local": {"steps": 4, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.3}},
        "privacy": PRIVATE,
        **sections,
    }


CHOSEN = {"metrics": ["balanced_accuracy", "recall_per_class", "./d.py:two"]}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").open()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rare")
    (path / "d.py").write_text(RARE)
    return path


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    return fedsim.run(experiment(evaluation=CHOSEN), out=base / "run", base=base).path


def predictions(run: Path, base: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return targets and predicted classes of the test set, from the saved model."""
    federation = assemble(load_experiment(experiment(), base=base), ledger=None)
    test = federation.data.test
    outputs = fedsim.load_model(run, base=base)(torch.from_numpy(test.features))
    return test.targets, outputs.argmax(1).numpy()


def test_rounds_and_scores_have_the_figures_of_scikit_learn(run: Path, base: Path) -> None:
    targets, predicted = predictions(run, base)
    last, scores = rows(run)[-1], json.loads((run / "scores.json").read_text())
    recalls = sk.recall_score(targets, predicted, average=None, labels=[0, 1])
    assert last["test_balanced_accuracy"] == sk.balanced_accuracy_score(targets, predicted)
    assert last["test_recall_per_class"] == list(recalls)
    assert last["test_two"] == 2
    assert "test_accuracy" not in last
    assert scores["classes"] == ["healthy", "ill"]
    assert scores["confusion"] == sk.confusion_matrix(targets, predicted, labels=[0, 1]).tolist()
    assert scores["majority"] == {"class": "healthy", "share": (targets == 0).mean()}
    assert [one["recall"] for one in scores["by_class"]] == list(recalls)
    assert scores["metrics"]["recall_per_class"] == last["test_recall_per_class"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_balanced_accuracy"] == last["test_balanced_accuracy"]
    assert "test_recall_per_class" not in summary
    assert summary["classes"] == ["healthy", "ill"]


def test_a_model_that_finds_no_ill_looks_as_bad_as_it_is(
    run: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fedsim.run(experiment(), out=base / "plain", base=base).path
    print_result(RunDirectory(path))
    text, page = capsys.readouterr().out, (path / "report.html").read_text()
    share = f"{json.loads((path / 'scores.json').read_text())['majority']['share']:.1%}"
    assert f"test accuracy {share} (majority baseline {share})" in text
    assert "recall by class  healthy: 100.0%, ill: 0%" in text
    assert "warning: The model finds none of the" in text
    assert "examples of class “ill”: its recall is 0%." in page
    assert f"majority baseline {share}" in page
    print_result(RunDirectory(run))
    assert "\ntest balanced accuracy" in capsys.readouterr().out, "the first metric of the file"


def test_verify_finds_a_changed_score(run: Path, base: Path) -> None:
    assert verify_run(RunDirectory.open(run)).problems == ()
    kept = (run / "scores.json").read_text()
    content = json.loads(kept)
    for change, message in (
        ({"majority": {"class": "ill", "share": 0.9}}, "the majority is not the largest"),
        ({"metrics": {**content["metrics"], "two": 3}}, "are not those of the last round"),
        ({"confusion": [[1, 2], [3, 4]]}, "the figures of class ill are not those of confusion"),
    ):
        (run / "scores.json").write_text(json.dumps({**content, **change}))
        problems = "\n".join(verify_run(RunDirectory.open(run)).problems)
        assert message in problems
        assert "scores.json: changed after" in problems
    (run / "scores.json").write_text(kept)


@pytest.mark.slow
def test_metrics_change_no_bit_of_training(run: Path, base: Path) -> None:
    other = fedsim.run(experiment(), out=base / "other", base=base).path
    one, two = (fedsim.load_model(each, base=base).state_dict() for each in (run, other))
    assert all((one[name] == two[name]).all() for name in one)
    assert (run / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()


def test_a_metric_that_fails_later_ends_the_run_with_one_line(base: Path, tmp_path: Path) -> None:
    (tmp_path / "d.py").write_text(
        RARE + "calls = []\ndef late(outputs, targets):\n    calls.append(1)\n"
        "    return outputs.sum().item() if len(calls) < 3 else None\n"
    )
    source = experiment(evaluation={"metrics": ["f1", "./d.py:late"]})
    with pytest.raises(fedsim.RunFailedError) as caught:
        run_experiment(source, out=tmp_path / "run", base=tmp_path)
    assert str(caught.value) == (
        "evaluation.metrics './d.py:late': must return one number, got NoneType"
    )
    assert not (tmp_path / "run" / "scores.json").exists()
    assert verify_run(RunDirectory.open(tmp_path / "run")).problems == ()


def test_an_interrupted_run_resumes_to_the_same_scores(
    run: Path, base: Path, stop_after: Any
) -> None:
    out, source = base / "again", experiment(evaluation=CHOSEN)
    run_experiment(source, out=out, base=base, callback=stop_after(1))
    early = json.loads((out / "scores.json").read_text())
    assert verify_run(RunDirectory.open(out)).problems == ()
    run_experiment(source, out=out, base=base, resume=True)
    assert (out / "scores.json").read_bytes() == (run / "scores.json").read_bytes()
    assert early != json.loads((out / "scores.json").read_text())


def test_metrics_on_public_examples_never_make_a_client_score_its_own(base: Path) -> None:
    """Held-out examples of personal models are private: no metric may reach them."""
    source = experiment(
        evaluation={"metrics": ["f1"]},
        personalization={"method": "fine_tune", "steps": 1, "lr": 0.1, "holdout": 0.2},
    )
    federation = assemble(load_experiment(source, base=base), ledger=None)
    assert federation.data.held_out is not None
    assert federation.client_task(0).scores.evaluate is None


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_numbers_and_labels_have_their_scores(tmp_path: Path, loss: str) -> None:
    (tmp_path / "d.py").write_text(
        "import numpy as np\ndef load(seed=0):\n    g = np.random.default_rng(0)\n"
        "    x = g.normal(size=(200, 3)).astype(np.float32)\n"
        "    return x, (x[:, :2] @ np.eye(2) > 1.5).astype(np.float32)\n"
    )
    chosen = {"mse": ["mae", "r2"], "bce": ["f1", "recall_per_class"]}[loss]
    source = experiment(
        model={"name": "logistic", "loss": loss, "args": {"init": "zeros"}},
        evaluation={"metrics": chosen},
        privacy=None,
    )
    path = fedsim.run(source, out=tmp_path / "run", base=tmp_path).path
    assert verify_run(RunDirectory.open(path)).problems == ()
    scores = json.loads((path / "scores.json").read_text())
    assert scores["confusion"] is None
    assert len(scores["by_class"]) == (2 if loss == "bce" else 0)
    assert ("Scores by label" in (path / "report.html").read_text()) is (loss == "bce")


HOSPITALS: dict[str, Any] = {
    "data": {
        "dataset": "heart_disease",
        "partition": {"scheme": "column", "column": "hospital"},
    },
    "model": {"name": "logistic", "features": [{"center": 0.5}], "args": {"init": "zeros"}},
    "evaluation": {"metrics": ["group_accuracy", "accuracy"], "group": "hospital"},
}


def accuracies_of(run: Path) -> dict[str, float]:
    """Accuracy of each hospital in scores.json, after its rules were checked."""
    scores = json.loads((run / "scores.json").read_text())
    accuracies = {row["group"]: row["accuracy"] for row in scores["by_group"]}
    assert scores["group"] == "hospital"
    assert rows(run)[-1]["test_group_accuracy"] == pytest.approx(np.mean([*accuracies.values()]))
    assert verify_run(RunDirectory.open(run)).problems == ()
    return accuracies


def test_each_hospital_has_its_own_accuracy_and_counts_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fedsim.run(experiment(**HOSPITALS), out=tmp_path / "run").path
    data = assemble(load_experiment(experiment(**HOSPITALS)), ledger=None).data
    assert data.test_groups is not None
    raw = data.test.features + np.float32(0.5)
    predicted = fedsim.load_model(run)(torch.from_numpy(raw)).argmax(1).numpy()
    hospitals = np.array(data.test_groups.names)
    assert accuracies_of(run) == {
        name: pytest.approx(
            sk.accuracy_score(data.test.targets[hospitals == name], predicted[hospitals == name])
        )
        for name in data.client_names or ()
    }
    print_result(RunDirectory(run))
    assert "\naccuracy by hospital  Cleveland: " in capsys.readouterr().out
    assert "Accuracy by hospital" in (run / "report.html").read_text()
    content = json.loads((run / "scores.json").read_text())
    content["by_group"][0]["accuracy"] -= 0.1
    (run / "scores.json").write_text(json.dumps(content))
    problems = "\n".join(verify_run(RunDirectory.open(run)).problems)
    assert "group_accuracy is not the mean accuracy of the groups" in problems


@pytest.mark.parametrize(("clients", "accuracy"), [(("a", "b"), 1.0), (None, 0.5)])
def test_a_group_is_scored_by_the_model_of_its_own_client(
    clients: tuple[str, ...] | None, accuracy: float
) -> None:
    module = nn.Linear(1, 2, bias=False)
    test = Examples(np.ones((4, 1), np.float32), np.array([0, 0, 1, 1]))
    groups = ExampleGroups("hospital", ("a", "a", "b", "b"))
    task = task_for("cross_entropy", test.targets)
    loss = resolve_loss("cross_entropy", base=Path())
    scores = PublicScores(
        module, loss, task, test, torch.device("cpu"), None, None, groups, clients
    )
    always = [
        ArrayRecord({"weight": Array(np.array([[1.0 - k], [k]], np.float32))}) for k in (0, 1)
    ]
    found = {row["group"]: row["accuracy"] for row in scores.by_class(always, {})["by_group"]}
    assert found == {"a": accuracy, "b": accuracy}  # the model of a always answers class 0
