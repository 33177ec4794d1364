"""Scores and other figures that a run writes at its end; each file has an entry in `FIGURES`.

`answers.json` of a run with `task: pate` has the queries (public examples that clients vote on),
noisy shares of the votes, and labels. All of these follow from charged releases and from public
labels, so they cost no further ε. `scores.json` has scores on public examples, which cost no ε.
`personalization.json` has the scores of personal models, only for data declared public.

`client_data.json` has figures of the clients' private data, computed after the last round. No ε
covers them. So they are written only in a run without differential privacy and without secure
aggregation, like the scores of `evaluation.holdout`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch

from fedsim.algorithms.state import ServerState
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL
from fedsim.core.metrics import GROUP_ACCURACY
from fedsim.core.plugin_errors import plugin_calls
from fedsim.core.text_formats import finite_or_none
from fedsim.experiment import Experiment
from fedsim.federation.federation import Federation
from fedsim.federation.voting import Voting
from fedsim.models.scores.metrics import class_names
from fedsim.models.scores.predictions import ClassPredictions, predictions_of
from fedsim.models.tasks import evaluate_with_outputs
from fedsim.pate.public_answers import LABELS, NOT_CHECKED, SHARES
from fedsim.protocol.arrays import to_numpy
from fedsim.protocol.errors import FederationError
from fedsim.runs.directory import RunFiles
from fedsim.runs.files import alike


@dataclass(frozen=True)
class EndedRun:
    """A run at its end, from which the files with scores and figures are computed.

    Computing figures overwrites the weights of the federation's model.
    """

    federation: Federation
    state: ServerState
    status: str
    metrics: Mapping[str, Any]


def is_scored(status: str, rounds: int) -> bool:
    """Whether a run with this status and number of rounds has a final model with scores."""
    return status != "failed" and rounds > 0


ANSWERS = "answers.json"
# Keys that a line of `rounds.jsonl` repeats.
COUNTS = ("queries_checked", "queries_answered", "label_accuracy")


def _answers(run: EndedRun) -> dict[str, Any] | None:
    """Return the queries and the answers of `task: pate`; None for another task."""
    voting = run.federation.goal
    if not isinstance(voting, Voting):
        return None
    rows = _rows(to_numpy(run.state.arrays), voting.queries.targets)
    return {**_counted(rows), "threshold": voting.settings.threshold, "queries": rows}


def _answer_problems(files: RunFiles) -> Iterator[str]:
    """Yield each contradiction of `answers.json` with other files, or that it is missing."""
    settings, content = files.experiment.pate, files.optional(ANSWERS)
    if (content is None) != (settings is None):
        yield f"{ANSWERS} belongs to runs with task: pate, and to no other run"
    if settings is None or content is None:
        return
    last = cast(dict[str, Any], files.rounds[-1]) if files.rounds else {}
    if any(files.summary.get(name) != last.get(name) for name in COUNTS):
        yield "the queries and answers of summary.json are not those of the last round"
    rows = content["queries"]
    if len(rows) != settings.queries or content["threshold"] != settings.threshold:
        yield f"{ANSWERS} has other queries, or another threshold, than experiment.yaml"
        return
    counts = {name: content[name] for name in COUNTS}
    if counts != _counted(rows):
        yield f"{ANSWERS}: its numbers are not those of its queries"
    row = files.last_round
    if row is not None and counts != {name: row[name] for name in COUNTS}:
        yield f"{ANSWERS}: its numbers are not those of the last round"
    if counts["queries_answered"] > settings.most_answers:
        yield f"{ANSWERS}: more queries are answered than every client is charged for"
    true = np.array([query["true"] for query in rows], dtype=np.int64)
    if files.state is not None and _rows(to_numpy(files.state.arrays), true) != rows:
        yield f"{ANSWERS}: shares or labels are not those of the checkpoint"


def _rows(answers: Mapping[str, np.ndarray], true: np.ndarray) -> list[dict[str, Any]]:
    """Return one mapping for each query, from the public answers and the true public labels."""
    columns = (array.tolist() for array in (answers[SHARES], answers[LABELS], true))
    return [
        {
            "query": query,
            "share": None if share < NOT_CHECKED / 2 else round(share, 6),
            "label": None if label == NO_LABEL else label,
            "true": real,
        }
        for query, (share, label, real) in enumerate(zip(*columns, strict=True))
    ]


def _counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    answered = [row for row in rows if row["label"] is not None]
    right = sum(row["label"] == row["true"] for row in answered)
    return {
        "queries_checked": sum(row["share"] is not None for row in rows),
        "queries_answered": len(answered),
        "label_accuracy": right / len(answered) if answered else None,
    }


CLIENT_DATA = "client_data.json"
CLIENT_DATA_NOTE = (
    "Figures of the clients' own examples, for the experimenter's eyes: no ε covers them. They are "
    "written only in runs without differential privacy and without secure aggregation."
)
MAX_COUNTS = 1_000_000  # clients times classes; a larger table is not written


def _may_write(experiment: Experiment) -> bool:
    """Whether an experiment promises nothing that these figures would break."""
    return experiment.privacy is None and experiment.secure_aggregation is None


def _client_data(run: EndedRun) -> dict[str, Any] | None:
    """Return the content of `client_data.json`; None where it is not written."""
    federation, data = run.federation, run.federation.data
    count = None if federation.model.task.name == "regression" else data.num_classes
    if count is None or not _may_write(federation.experiment):
        return None
    numbers = range(len(data.clients))
    if count * len(numbers) > MAX_COUNTS:
        return None
    clients = [{"client": k, "labels": _counts(data.clients.targets(k), count)} for k in numbers]
    if is_scored(run.status, run.state.round_number):
        for row, scores in zip(clients, _held_out(run, count), strict=False):
            row.update(scores)
    return {
        "figures_of": "private data",
        "note": CLIENT_DATA_NOTE,
        "classes": class_names(count, data.class_names),
        "clients": clients,
    }


def _client_data_problems(files: RunFiles) -> Iterator[str]:
    """Yield each contradiction of `client_data.json`, or that the run may not have the file."""
    content = files.optional(CLIENT_DATA)
    if content is None:
        return
    if not _may_write(files.experiment):
        yield f"{CLIENT_DATA} holds figures of private data, in a run that promises to protect them"
        return
    classes, rows, clients = content["classes"], content["clients"], files.clients
    if [row["client"] for row in rows] != list(range(len(clients))):
        yield f"{CLIENT_DATA}: its clients are not those of privacy.json"
    for row, recorded in zip(rows, clients, strict=False):
        name, held_out = f"{CLIENT_DATA}: client {row['client']}", row.get("held_out")
        if len(row["labels"]) != len(classes) or sum(row["labels"]) != recorded["examples"]:
            yield f"{name} has other examples than in privacy.json"
        if held_out is None:
            continue
        pairs = list(zip(row["correct"], held_out, strict=True))
        if len(pairs) != len(classes) or any(not 0 <= hits <= n for hits, n in pairs):
            yield f"{name} has more correct predictions than held-out examples"


def _held_out(run: EndedRun, count: int) -> Iterator[dict[str, list[int]]]:
    """Yield for each client its held-out examples and its correct predictions, by class."""
    federation, held_out = run.federation, run.federation.data.held_out
    if federation.experiment.client_evaluation is None or held_out is None:
        return
    model, failed = federation.model, "the global model failed on held-out examples"
    model.module.load_state_dict(federation.final_model(run.state).to_torch_state_dict())
    for client in range(len(held_out)):
        examples = held_out[client]
        hits = [0] * count
        if len(examples):
            with plugin_calls(failed, raises=FederationError):
                _, outputs = evaluate_with_outputs(
                    model.module, model.loss, model.task, examples, device=model.device
                )
            predictions = predictions_of(model.task, outputs, torch.from_numpy(examples.targets))
            if not isinstance(predictions, ClassPredictions):
                return
            hits = predictions.hits.tolist()
        yield {"held_out": _counts(examples.targets, count), "correct": hits}


def _counts(targets: np.ndarray, count: int) -> list[int]:
    """Return the number of examples of each class."""
    return np.bincount(np.asarray(targets, np.int64).ravel(), minlength=count).tolist()


SCORES = "scores.json"
_SAME = 1e-9  # largest difference of a ratio that is computed again


def _scores(run: EndedRun) -> dict[str, Any] | None:
    """Return the scores of the final model by class; a failed run has none."""
    if not is_scored(run.status, run.state.round_number):
        return None
    scores = run.federation.public_scores
    return scores.by_class(run.federation.scored_models(run.state), run.metrics)


def public_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the test-set metrics in a line of `rounds.jsonl`, by name without `test_`."""
    return {k.removeprefix("test_"): v for k, v in row.items() if k.startswith("test_")}


def _score_problems(files: RunFiles) -> Iterator[str]:
    """Yield each contradiction of `scores.json` with the last round or within the file."""
    content, summary = files.optional(SCORES), files.summary
    if (content is not None) != is_scored(summary["status"], summary["rounds"]):
        yield f"{SCORES} belongs to runs that did not fail and have a round, and to no other run"
    row = files.last_round
    if content is None or row is None:
        return
    if content["metrics"] != public_metrics(row):
        yield f"the metrics of {SCORES} are not those of the last round"
    mean = content["metrics"].get(GROUP_ACCURACY)
    accuracies = [group["accuracy"] for group in content["by_group"]]
    if mean is not None and not (accuracies and abs(mean - fmean(accuracies)) <= _SAME):
        yield f"{SCORES}: {GROUP_ACCURACY} is not the mean accuracy of the groups"
    if content["confusion"] is not None:
        yield from _confusion_problems(content, content["confusion"])


def _confusion_problems(content: Mapping[str, Any], matrix: list[list[int]]) -> Iterator[str]:
    """Yield each figure of `scores.json` that does not follow from the confusion matrix."""
    examples, predicted = [sum(row) for row in matrix], [sum(c) for c in zip(*matrix, strict=True)]
    hits, total = [row[index] for index, row in enumerate(matrix)], sum(examples)
    names = content["classes"]
    rows = zip(content["by_class"], names, hits, examples, predicted, strict=True)
    for recorded, name, right, given, found in rows:
        figures = {
            "class": name,
            "examples": given,
            "predicted": found,
            "recall": right / given if given else None,
            "precision": right / found if found else None,
        }
        if not alike(recorded, figures, relative=0.0, absolute=_SAME):
            yield f"{SCORES}: the figures of class {name} are not those of confusion"
    most = max(examples)
    if content["majority"] != {"class": names[examples.index(most)], "share": most / total}:
        yield f"{SCORES}: the majority is not the largest class of confusion"
    accuracy = content["metrics"].get("accuracy")
    if accuracy is not None and abs(accuracy - sum(hits) / total) > _SAME:
        yield f"{SCORES}: the accuracy is not that of confusion"


PERSONALIZATION = "personalization.json"
NOTE = (
    "Figures of public data: personalization.public_data declares that all examples are public. "
    "No ε covers a score on a client's own examples; on private data none is computed."
)
_ENDED = ("completed", "stopped")  # how runs with scores of personal models end


def _personal_scores(run: EndedRun) -> dict[str, Any] | None:
    """Return the scores of personal models; None unless the data are declared public.

    They are computed after the last round, from the final model, outside of every message.
    """
    federation, settings = run.federation, run.federation.experiment.personalization
    if settings is None or not settings.public_data:
        return None
    if run.status not in _ENDED or not run.state.round_number:
        return None
    from fedsim.personalization.personalize import score_clients

    model, loss, task = federation.model.module, federation.model.loss, federation.model.task
    model.load_state_dict(run.state.model.to_torch_state_dict())
    seed = federation.experiment.seed
    rows = list(score_clients(settings, model, loss, task, federation.data, seed=seed))
    return {
        "figures_of": "public data",
        "note": NOTE,
        "settings": settings.model_dump(mode="json"),
        **_pooled(rows),
        "clients": rows,
    }


def summary_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `personalization.json` that is also in `summary.json`."""
    return {key: content[key] for key in ("figures_of", "held_out", "global", "personal")}


def personal_metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean metrics of personal models, by names such as `personal_loss`."""
    personal = summary.get("personalization") or {"personal": {}}
    return {f"personal_{name}": value for name, value in personal["personal"].items()}


def _personal_problems(files: RunFiles) -> Iterator[str]:
    """Yield each contradiction between the files about personal models."""
    settings, summary = files.experiment.personalization, files.summary
    content, repeated = files.optional(PERSONALIZATION), summary.get("personalization")
    if settings is None or not settings.public_data:
        if content is not None or repeated is not None:
            yield "scores of personal models, and experiment.yaml does not declare public data"
        return
    if content is None:
        ended = summary["status"] in _ENDED and summary["rounds"]
        if ended or repeated is not None:
            yield f"{PERSONALIZATION} is missing"
        return
    if content["settings"] != settings.model_dump(mode="json"):
        yield f"the settings of {PERSONALIZATION} are not those of experiment.yaml"
    if repeated != summary_of(content):
        yield f"the scores of personal models in summary.json are not those of {PERSONALIZATION}"
    expected = _pooled(content["clients"])
    for name in ("global", "personal"):
        if not alike(content[name], expected[name], relative=_SAME, absolute=_SAME):
            yield f"{PERSONALIZATION}: the {name} scores are not the means over its clients"
    if content["held_out"] != expected["held_out"]:
        yield f"{PERSONALIZATION}: held_out is not the sum over its clients"


def _pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over all held-out examples; null where a client's value is not finite."""
    total, means = sum(row["held_out"] for row in rows), dict[str, dict[str, float | None]]()
    for kind in ("global", "personal"):
        scored = [(row["held_out"], row[kind]) for row in rows if row[kind] != {}]
        means[kind] = {}
        for name in scored[0][1] if scored else ():
            values = (n * (math.nan if m[name] is None else m[name]) for n, m in scored)
            means[kind][name] = finite_or_none(sum(values) / total)
    return {"held_out": total, **means}


@dataclass(frozen=True)
class FigureFile:
    """A file with scores or figures of a run, and the functions that compute and check its content.

    `content` returns None if the run has no such file. `problems` also reads the files `others`.
    """

    name: str
    content: Callable[[EndedRun], dict[str, Any] | None]
    others: str
    problems: Callable[[RunFiles], Iterator[str]]


FIGURES = (
    FigureFile(SCORES, _scores, "summary.json and rounds.jsonl", _score_problems),
    FigureFile(ANSWERS, _answers, "rounds.jsonl and the checkpoint", _answer_problems),
    FigureFile(
        PERSONALIZATION, _personal_scores, "summary.json and experiment.yaml", _personal_problems
    ),
    FigureFile(
        CLIENT_DATA, _client_data, "privacy.json and experiment.yaml", _client_data_problems
    ),
)
