"""Every built-in metric is the one of scikit-learn that its entry in the catalogue names."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch

from fedsim.core.metrics import GROUP_ACCURACY, METRICS, metric_entry, metric_key, metric_name
from fedsim.models.catalog import MetricError
from fedsim.models.scores.metrics import choose_metrics
from fedsim.models.tasks import Task, task_for

sk: Any = sklearn.metrics
ONE_SET = {name: entry for name, entry in METRICS.items() if name != GROUP_ACCURACY}
"""All but the metric of groups, which `tests/runs/test_scores.py` checks."""
RNG = np.random.default_rng(7)
N = 211
Reference = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


def score(name: str, task: Task, outputs: np.ndarray, targets: np.ndarray) -> Any:
    o, t = torch.from_numpy(outputs), torch.from_numpy(targets)
    known = task.metrics(task.score(o, t), targets)
    found = choose_metrics([name], task, base=Path())(known, o, t)
    return found[metric_key(name)]


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def average(outputs: np.ndarray) -> str:
    return "binary" if outputs.shape[1] == 2 else "macro"


def one_against_rest(area: Callable[..., Any]) -> Reference:
    def reference(t: np.ndarray, p: np.ndarray, o: np.ndarray) -> float:
        del p
        if o.shape[1] == 2:
            return area(t, o[:, 1].astype(float) - o[:, 0])
        there = [c for c in range(o.shape[1]) if (t == c).any()]
        return float(np.mean([area(t == c, softmax(o)[:, c]) for c in there]))

    return reference


NAN = {"zero_division": np.nan}
CLASSES: dict[str, Reference] = {
    "accuracy": lambda t, p, o: sk.accuracy_score(t, p),
    "balanced_accuracy": lambda t, p, o: sk.balanced_accuracy_score(t, p),
    "f1": lambda t, p, o: sk.f1_score(t, p, average=average(o)),
    "precision": lambda t, p, o: sk.precision_score(t, p, average=average(o)),
    "recall": lambda t, p, o: sk.recall_score(t, p, average=average(o)),
    "f1_macro": lambda t, p, o: sk.f1_score(t, p, average="macro"),
    "f1_weighted": lambda t, p, o: sk.f1_score(t, p, average="weighted"),
    "auc": one_against_rest(sk.roc_auc_score),
    "average_precision": one_against_rest(sk.average_precision_score),
    "log_loss": lambda t, p, o: sk.log_loss(t, softmax(o), labels=range(o.shape[1])),
    "mcc": lambda t, p, o: sk.matthews_corrcoef(t, p),
    "kappa": lambda t, p, o: sk.cohen_kappa_score(t, p),
    "top_3_accuracy": lambda t, p, o: sk.top_k_accuracy_score(t, top(o), k=3, labels=every(o)),
    "top_5_accuracy": lambda t, p, o: sk.top_k_accuracy_score(t, top(o), k=5, labels=every(o)),
    "recall_per_class": lambda t, p, o: sk.recall_score(t, p, average=None, labels=every(o), **NAN),
    "precision_per_class": lambda t, p, o: sk.precision_score(
        t, p, average=None, labels=every(o), **NAN
    ),
    "f1_per_class": lambda t, p, o: sk.f1_score(t, p, average=None, labels=every(o), **NAN),
}
NUMBERS: dict[str, Reference] = {
    "mse": lambda t, p, o: sk.mean_squared_error(t, o),
    "rmse": lambda t, p, o: sk.root_mean_squared_error(t, o),
    "mae": lambda t, p, o: sk.mean_absolute_error(t, o),
    "median_absolute_error": lambda t, p, o: sk.median_absolute_error(t, o),
    "max_error": lambda t, p, o: np.abs(t - o).max(),
    "r2": lambda t, p, o: sk.r2_score(t, o),
    "explained_variance": lambda t, p, o: sk.explained_variance_score(t, o),
}


def every(outputs: np.ndarray) -> range:
    return range(outputs.shape[1])


def top(outputs: np.ndarray) -> np.ndarray:
    return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs


def outputs_of(classes: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    targets = RNG.integers(0, classes, N)
    outputs = RNG.normal(size=(N, classes)).astype(np.float32)
    if kind == "ties":
        outputs = np.round(outputs)
    elif kind == "one answer":
        outputs[:, 0] = 50.0
    elif kind == "a class is missing":
        targets[targets == 1] = 0
    else:
        outputs[np.arange(N), targets] += 1
    return outputs, targets


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["some skill", "ties", "one answer", "a class is missing"])
def test_metrics_of_classes_are_those_of_scikit_learn(name: str, kind: str) -> None:
    for classes in (2, 6):
        outputs, targets = outputs_of(classes, kind)
        if kind == "a class is missing" and classes == 2 and name in ("auc", "average_precision"):
            continue  # not defined, see below
        task = task_for("cross_entropy", targets, num_classes=classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = CLASSES[name](targets, outputs.argmax(1), outputs)
        found = score(name, task, outputs, targets)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("width", [1, 3])
def test_metrics_of_numbers_are_those_of_scikit_learn(name: str, width: int) -> None:
    targets = (RNG.normal(size=(N, width)) * [1, 5, 9][:width] + 3).astype(np.float32)
    outputs = (targets + RNG.normal(size=(N, width)) + 0.5).astype(np.float32)
    if width > 1:
        targets[:, 0] = 2.0  # a constant column
    exact = targets.astype(np.float64), outputs.argmax(1), outputs.astype(np.float64)
    found = score(name, task_for("mse", targets), outputs, targets)
    assert found == pytest.approx(NUMBERS[name](*exact), rel=1e-12)


@pytest.mark.parametrize("name", [name for name, entry in ONE_SET.items() if entry.several_labels])
def test_metrics_of_several_labels_are_those_of_scikit_learn(name: str) -> None:
    targets = (RNG.random((N, 3)) < [0.5, 0.1, 0.3]).astype(np.float32)
    outputs = (RNG.normal(size=(N, 3)) + targets).astype(np.float32)
    predicted = (outputs > 0).astype(np.float32)
    kind = {"f1": "macro", "precision": "macro", "recall": "macro"}
    scores = {"f1": sk.f1_score, "precision": sk.precision_score, "recall": sk.recall_score}
    area = {"auc": sk.roc_auc_score, "average_precision": sk.average_precision_score}
    base, _, rest = name.partition("_")
    if name == "accuracy":
        expected: Any = (predicted == targets).mean()
    elif name in area:
        expected = area[name](targets, outputs, average="macro")
    else:
        averaged = None if rest == "per_class" else rest or kind[base]
        expected = scores[base](targets, predicted, average=averaged)
    found = score(name, task_for("bce", targets), outputs, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", [n for n in CLASSES if not n.startswith("top_")])
def test_one_label_is_scored_as_two_classes(name: str) -> None:
    targets = (RNG.random(N) < 0.3).astype(np.float32)
    outputs = RNG.normal(size=(N, 1)).astype(np.float32)
    outputs[:9] = 0
    both = np.concatenate([np.zeros_like(outputs), outputs], axis=1)
    expected = CLASSES[name](targets.astype(int), both.argmax(1), both)
    found = score(name, task_for("bce", targets), outputs, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["auc", "average_precision"])
def test_areas_are_not_defined_for_one_class_or_outputs_that_are_not_finite(name: str) -> None:
    outputs, targets = outputs_of(2, "ties")
    task = task_for("cross_entropy", targets, num_classes=2)
    assert np.isnan(score(name, task, outputs, np.zeros_like(targets)))
    outputs[3, 1] = np.inf
    for one in (name, "log_loss", "top_3_accuracy"):
        assert np.isnan(score(one, task, outputs, targets))
    assert not np.isnan(score("f1", task, outputs, targets))


def test_every_metric_of_the_catalogue_has_a_reference_here() -> None:
    assert set(ONE_SET) == {*CLASSES, *NUMBERS}
    named = {one for entry in ONE_SET.values() for one in re.findall(r"\((\w+)", entry.description)}
    assert all(hasattr(sk, one) for one in named)


def own(tmp_path: Path, body: str) -> Callable[[], Any]:
    (tmp_path / "m.py").write_text(f"import torch\ndef f(outputs, targets):\n    {body}\n")
    task = task_for("cross_entropy", np.array([0, 1, 1]))
    outputs, targets = torch.tensor([[2.0, 1], [0, 1], [3, 1]]), torch.tensor([0, 1, 1])

    def call() -> Any:
        chosen = choose_metrics(["accuracy", "./m.py:f", "f1"], task, base=tmp_path)
        return chosen({"accuracy": 2 / 3}, outputs, targets)

    return call


@pytest.mark.parametrize(
    "body",
    [
        "return (outputs.argmax(1) == targets).double().mean()",
        "return float((outputs.argmax(1) == targets).double().mean())",
        "return (outputs.argmax(1) == targets).double().mean().numpy()[()]",
        "r = (outputs.argmax(1) == targets).double().mean(); outputs.zero_(); return r",
    ],
)
def test_a_function_of_the_users_own_scores_the_whole_test_set(tmp_path: Path, body: str) -> None:
    found = own(tmp_path, body)()
    assert found == {"accuracy": 2 / 3, "f": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return outputs", "must return one number, got Tensor of shape (3, 2)"),
        ("return None", "must return one number, got NoneType"),
        ("return 'good'", "must return one number, got str"),
        ("return True", "must return one number, got bool"),
        ("raise ValueError('no positives')", "failed with ValueError: no positives (m.py, line 3)"),
        ("return outputs @ targets", "it is called with outputs (3, 2) and targets (3,)"),
        ("raise SystemExit", "failed with SystemExit"),
    ],
)
def test_a_bad_function_is_one_clear_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(MetricError) as caught:
        own(tmp_path, body)()
    text = str(caught.value)
    assert message in text
    assert text.startswith("evaluation.metrics './m.py:f': ")
    assert "\n" not in text


def test_several_labels_have_no_metric_of_one_label() -> None:
    targets = np.zeros((4, 3), dtype=np.float32)
    with pytest.raises(MetricError, match="mcc scores one label, and an example has 3"):
        score("mcc", task_for("bce", targets), np.zeros((4, 3), dtype=np.float32), targets)


def test_a_metric_of_another_task_is_refused() -> None:
    task = task_for("./my.py:loss", np.array([0, 1, 2]))
    with pytest.raises(MetricError, match="r2 scores numbers, and this model predicts classes"):
        choose_metrics(["r2"], task, base=Path())


@pytest.mark.parametrize("name", ONE_SET)
def test_a_perfect_model_has_the_best_value_and_a_poor_one_is_on_the_other_side(name: str) -> None:
    entry = METRICS[name]
    if name in CLASSES:
        targets = np.arange(N) % 6
        best = np.full((N, 6), -40.0, dtype=np.float32)
        best[np.arange(N), targets] = 40.0
        task = task_for("cross_entropy", targets, num_classes=6)
        poor = np.roll(best, 7, axis=0)  # no target is first
    else:
        targets = best = RNG.normal(size=(N, 1)).astype(np.float32)
        task, poor = task_for("mse", targets), best[::-1].copy()
    least, most = entry.bounds
    perfect = least if entry.smaller_is_better else most
    found, worse = (np.mean(score(name, task, one, targets)) for one in (best, poor))
    assert found == pytest.approx(perfect, abs=1e-12)
    assert (worse > found) if entry.smaller_is_better else (worse < found)
    assert least <= worse <= most


@pytest.mark.parametrize(
    "name", [name for name, entry in ONE_SET.items() if entry.constant is not None]
)
def test_a_constant_prediction_has_the_constant_value_of_the_entry(name: str) -> None:
    if name in CLASSES:
        targets = RNG.integers(0, 2, size=N)
        task = task_for("cross_entropy", targets, num_classes=2)
        constant = np.tile(np.array([1.0, -1.0], dtype=np.float32), (N, 1))
    else:
        targets = RNG.normal(size=(N, 1)).astype(np.float32)
        task, constant = task_for("mse", targets), np.full_like(targets, targets.mean())
    found = np.mean(score(name, task, constant, targets))
    assert found == pytest.approx(METRICS[name].constant, abs=1e-6)


def test_a_metric_is_read_by_its_entry_whatever_it_was_measured_on() -> None:
    assert metric_entry("client_r2") == METRICS["r2"]
    assert metric_entry("test_loss").smaller_is_better
    assert metric_entry("test_my_accuracy").in_percent
    assert metric_entry("test_mine").bounds == (-np.inf, np.inf)
    assert metric_name("personal_mse") == "mean squared error"
    assert metric_name("clients_balanced_accuracy") == "balanced accuracy"
