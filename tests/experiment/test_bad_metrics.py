"""Ten bad metrics: one clear line each, with its place, before anything runs."""

from pathlib import Path

import pytest

from fedsim.core.errors import InputError
from fedsim.experiment import ExperimentError, load_experiment
from fedsim.federation.assembly import assemble

FILE = """\
name: tiny
data: {{dataset: digits, partition: {{scheme: iid, num_clients: 2}}}}
model: {{name: logistic, loss: {loss}}}
federation: {{rounds: 1}}
local: {{steps: 1, batch_size: 8}}
privacy: null
evaluation: {{{evaluation}}}
"""
OWN = """\
def loss(outputs, targets):
    return outputs.sum()
def share(outputs, targets):
    return float((outputs.argmax(1) == targets).double().mean())
def every(outputs, targets):
    return outputs.argmax(1) == targets
def broken(outputs, targets):
    return outputs[targets > 99].max()
number = 3
"""


def write(directory: Path, evaluation: str, loss: str = "cross_entropy") -> Path:
    (directory / "m.py").write_text(OWN)
    path = directory / "exp.yaml"
    path.write_text(FILE.format(evaluation=evaluation, loss=loss))
    return path


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ("metrics: [acuracy]", "7:24: evaluation.metrics.0: unknown metric 'acuracy'; did you me"),
        ("metrics: accuracy", "7:14: evaluation.metrics: must be a list, got 'accuracy'"),
        ("metrics: []", "7:14: evaluation.metrics: must have at least 1 "),
        ("metrics: [f1, 3]", "7:28: evaluation.metrics.1: must be "),
        ("metrics: [f1, auc, f1]", "7:33: evaluation.metrics.2: f1 is named twice; remove one"),
        ("metrics: [r2]", "7:24: evaluation.metrics.0: r2 scores numbers, and this model predi"),
        ("metrics: [loss]", "7:24: evaluation.metrics.0: loss is always computed; remove it"),
        ("metrics: [./m.py]", "unknown metric './m.py'; to use a function of the file write"),
        ("metrics: [./none.py:f]", "7:24: evaluation.metrics.0: no such file: "),
        ("metrics: [./m.py:loss]", "./m.py:loss has the name of loss, which is always computed"),
        (
            "every_rounds: 2",
            "evaluation: every_rounds is for evaluation on clients, which needs holdout",
        ),
        ("metrics: [group_accuracy]", "evaluation.group: missing; group_accuracy needs the column"),
        ("group: ward", "evaluation.group: the dataset has no column 'ward' that names groups"),
        ("clients: 1", "evaluation: clients is for evaluation on clients, which needs holdout"),
    ],
)
def test_a_wrong_metric_is_found_in_the_file(tmp_path: Path, evaluation: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(tmp_path, evaluation))
    (line,) = str(caught.value).splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("./m.py:shares", "'./m.py:shares': .*m.py has no 'shares'; did you mean share"),
        ("./m.py:number", "number is not callable, it is a int"),
        ("./m.py:every", r"must return one number, got Tensor of shape \(359,\)"),
        ("./m.py:broken", r"failed with .*m.py, line 8\); it is called with outputs \(359, 10\)"),
        ("nowhere.at:all", "no module named 'nowhere'"),
    ],
)
def test_a_wrong_function_is_found_before_the_first_round(
    tmp_path: Path, reference: str, message: str
) -> None:
    loaded = load_experiment(write(tmp_path, f'metrics: ["{reference}"]'))
    with pytest.raises(InputError, match=message) as caught:
        assemble(loaded, ledger=None)
    assert "\n" not in str(caught.value)
    assert "evaluation.metrics" in str(caught.value)


def test_good_metrics_are_loaded_and_their_sources_recorded(tmp_path: Path) -> None:
    loaded = load_experiment(write(tmp_path, "metrics: [f1, ./m.py:share, recall_per_class]"))
    assert loaded.experiment.plugins == ("./m.py:share",)
    federation = assemble(loaded, ledger=None)
    found = federation.test_metrics(federation.initial_arrays())
    assert list(found) == ["test_loss", "test_f1", "test_share", "test_recall_per_class"]
    assert federation.sources.entries
