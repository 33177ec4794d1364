"""`scores.json` of the final model by class, and `personalization.json` of personal models.

Figures of the first are of public examples, so nothing of them is charged. The second is written
only for data declared public.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord

from fedsim.core.text_formats import finite_or_none
from fedsim.federation.federation import Federation
from fedsim.personalization.settings import PersonalizationSettings
from fedsim.runs.files import SCHEMAS

if TYPE_CHECKING:
    from fedsim.personalization.scores import ClientScores


SCORES = "scores.json"
_SAME = 1e-9  # relative: a ratio, computed again


def scores_content(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the file from the scores of the final model."""
    return {"schema": SCHEMAS[SCORES], **found}


def public_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics on the test set in a line of `rounds.jsonl`, by name without `test_`."""
    return {
        name.removeprefix("test_"): value for name, value in row.items() if name.startswith("test_")
    }


def score_contradictions(content: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `scores.json` says and does not agree with the last round or with itself.

    Args:
        content: the file.
        row: the last line of `rounds.jsonl`.
    """
    if content["metrics"] != public_metrics(row):
        yield f"the metrics of {SCORES} are not those of the last round"
    matrix = content["confusion"]
    if matrix is None:
        return
    for index, one in enumerate(content["by_class"]):
        hits = matrix[index][index]
        if sum(matrix[index]) != one["examples"]:
            yield f"{SCORES}: class {one['class']} has not the examples of its row in confusion"
        elif sum(line[index] for line in matrix) != one["predicted"]:
            yield (
                f"{SCORES}: class {one['class']} has not the predictions of its column in confusion"
            )
        elif not _is_ratio(one["recall"], hits, one["examples"]):
            yield f"{SCORES}: the recall of class {one['class']} is not that of confusion"
        elif not _is_ratio(one["precision"], hits, one["predicted"]):
            yield f"{SCORES}: the precision of class {one['class']} is not that of confusion"
    yield from _totals(content, matrix)


def _totals(content: Mapping[str, Any], matrix: list[list[int]]) -> Iterator[str]:
    sizes, total = [sum(line) for line in matrix], sum(map(sum, matrix))
    correct = sum(line[index] for index, line in enumerate(matrix))
    most = {"class": content["classes"][sizes.index(max(sizes))], "share": max(sizes) / total}
    if content["majority"] != most:
        yield f"{SCORES}: the majority is not the largest class of confusion"
    accuracy = content["metrics"].get("accuracy")
    if accuracy is not None and not _is_ratio(accuracy, correct, total):
        yield f"{SCORES}: the accuracy is not that of confusion"


def _is_ratio(value: float | None, part: int, whole: int) -> bool:
    if value is None or whole == 0:
        return value is None and whole == 0
    return abs(value - part / whole) <= _SAME


PERSONALIZATION = "personalization.json"
FIGURES_OF = "public data"
NOTE = (
    "Figures of public data: personalization.public_data declares that all examples are public. "
    "No ε covers a score on a client's own examples; on private data none is computed."
)
ENDED = ("completed", "stopped")  # how runs with scores end
# relative: sums in another order


def score_personal_models(federation: Federation, arrays: ArrayRecord) -> dict[str, Any] | None:
    """Return the content of `personalization.json`; None unless the data are declared public.

    It is computed after the last round, from the final model, outside of every message.

    Args:
        federation: the federation; its model is overwritten.
        arrays: the final global model.
    """
    settings = federation.experiment.personalization
    if settings is None or not settings.public_data:
        return None
    from fedsim.personalization.scores import ScoredModel, score_clients

    federation.model.module.load_state_dict(arrays.to_torch_state_dict())
    scored = ScoredModel(federation.model.module, federation.model.loss, federation.model.task)
    seed = federation.experiment.seed
    found = list(score_clients(settings, scored, federation.data, seed=seed))
    return {
        "schema": SCHEMAS[PERSONALIZATION],
        "figures_of": FIGURES_OF,
        "note": NOTE,
        "settings": settings.model_dump(mode="json"),
        **_pooled([_row(each) for each in found]),
        "clients": [_row(each) for each in found],
    }


def summary_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `summary.json` repeats of `personalization.json`."""
    return {key: content[key] for key in ("figures_of", "held_out", "global", "personal")}


def personal_metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pooled metrics of the personal models in `summary.json`, as `personal_...`."""
    found = summary.get("personalization") or {"personal": {}}
    return {f"personal_{name}": value for name, value in found["personal"].items()}


def contradictions(
    settings: PersonalizationSettings | None,
    summary: Mapping[str, Any],
    content: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield what the files say of personal models and do not agree on.

    Args:
        settings: `personalization:` of `experiment.yaml`.
        summary: `summary.json`.
        content: `personalization.json`; None where there is none.
    """
    repeated = summary.get("personalization")
    if settings is None or not settings.public_data:
        if content is not None or repeated is not None:
            yield "scores of personal models, and experiment.yaml does not declare public data"
        return
    if content is None:
        ended = summary["status"] in ENDED and summary["rounds"]
        if ended or repeated is not None:
            yield f"{PERSONALIZATION} is missing"
        return
    if content["settings"] != settings.model_dump(mode="json"):
        yield f"the settings of {PERSONALIZATION} are not those of experiment.yaml"
    if repeated != summary_of(content):
        yield f"the scores of personal models in summary.json are not those of {PERSONALIZATION}"
    expected = _pooled(content["clients"])
    for name in ("global", "personal"):
        if not _same(content[name], expected[name]):
            yield f"{PERSONALIZATION}: the {name} scores are not the means over its clients"
    if content["held_out"] != expected["held_out"]:
        yield f"{PERSONALIZATION}: held_out is not the sum over its clients"


def _row(found: "ClientScores") -> dict[str, Any]:
    return {
        "client": found.client,
        "examples": found.examples,
        "held_out": found.held_out,
        "global": _finite(found.global_model),
        "personal": _finite(found.personal_model),
    }


def _finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in scores.items()}


def _pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over all held-out examples; null where a client has none that is finite."""
    weights = [row["held_out"] for row in rows]
    means = {}
    for name in ("global", "personal"):
        numbers = [{k: float("nan") if v is None else v for k, v in r[name].items()} for r in rows]
        means[name] = _finite(pooled(numbers, weights))
    return {"held_out": sum(weights), **means}


def pooled(scores: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    """Return the means over all held-out examples of all clients.

    Args:
        scores: metrics of each client; empty for a client without examples.
        weights: number of held-out examples of each.
    """
    names = next((list(each) for each in scores if each), [])
    whole = sum(weights)
    return {
        name: sum(w * each[name] for each, w in zip(scores, weights, strict=True) if each) / whole
        for name in names
    }


def _same(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> bool:
    def alike(a: float | None, b: float | None) -> bool:
        return a == b or (a is not None and b is not None and abs(a - b) <= _SAME * max(abs(a), 1))

    return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
