"""`scores.json`: the final model on the public test set, class by class, beside the majority.

Every figure is of public examples, so nothing of it is charged.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.runs.schema import SCHEMAS

FILE = "scores.json"
_SAME = 1e-9  # relative: a ratio, computed again


def scores_content(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the file from the scores of the final model."""
    return {"schema": SCHEMAS[FILE], **found}


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
        yield f"the metrics of {FILE} are not those of the last round"
    matrix = content["confusion"]
    if matrix is None:
        return
    for index, one in enumerate(content["by_class"]):
        hits = matrix[index][index]
        if sum(matrix[index]) != one["examples"]:
            yield f"{FILE}: class {one['class']} has not the examples of its row in confusion"
        elif sum(line[index] for line in matrix) != one["predicted"]:
            yield f"{FILE}: class {one['class']} has not the predictions of its column in confusion"
        elif not _is_ratio(one["recall"], hits, one["examples"]):
            yield f"{FILE}: the recall of class {one['class']} is not that of confusion"
        elif not _is_ratio(one["precision"], hits, one["predicted"]):
            yield f"{FILE}: the precision of class {one['class']} is not that of confusion"
    yield from _totals(content, matrix)


def _totals(content: Mapping[str, Any], matrix: list[list[int]]) -> Iterator[str]:
    sizes, total = [sum(line) for line in matrix], sum(map(sum, matrix))
    correct = sum(line[index] for index, line in enumerate(matrix))
    most = {"class": content["classes"][sizes.index(max(sizes))], "share": max(sizes) / total}
    if content["majority"] != most:
        yield f"{FILE}: the majority is not the largest class of confusion"
    accuracy = content["metrics"].get("accuracy")
    if accuracy is not None and not _is_ratio(accuracy, correct, total):
        yield f"{FILE}: the accuracy is not that of confusion"


def _is_ratio(value: float | None, part: int, whole: int) -> bool:
    if value is None or whole == 0:
        return value is None and whole == 0
    return abs(value - part / whole) <= _SAME
