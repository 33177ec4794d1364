"""The section on clients' private data: labels, and accuracy by class, of each client.

A run with differential privacy or secure aggregation has none of it (`fedsim.runs.client_data`).
"""

from collections.abc import Sequence
from typing import Any

from fedsim.core.formatting import metric_text
from fedsim.report.contents import RunContents
from fedsim.report.sections.heat_map import MAX_NAMED_ROWS, HeatMap, draw_heat_map
from fedsim.runs.client_data import NOTE

_MAX_TIP_CLASSES = 6
_MAX_ROWS = 500  # of a figure: more clients than pixels would only make the file larger


def client_data_context(contents: RunContents) -> dict[str, Any] | None:
    """Return what the template needs; None in a run that has no such figures."""
    found = contents.client_data
    if found is None or contents.is_private or contents.privacy.get("secure_aggregation"):
        return None
    rows = _ordered(found["clients"])
    scored = [row for row in rows if sum(row.get("held_out", ()))]
    return {
        "note": NOTE,
        "labels": _label_map(rows, found["classes"], contents),
        "skew": f"{100 * _label_skew(rows):.0f}%",
        "accuracy": _accuracy_map(scored, found["classes"], contents) if scored else None,
        "left_out": len(found["clients"]) - len(rows),
    }


def held_out_accuracies(contents: RunContents) -> dict[int, str] | None:
    """Return the accuracy on each client's held-out examples; None where none was measured."""
    rows = [] if contents.client_data is None else contents.client_data["clients"]
    sums = {
        row["client"]: (sum(row["correct"]), sum(row["held_out"]))
        for row in rows
        if "held_out" in row
    }
    found = {
        client: metric_text("accuracy", hits / count)
        for client, (hits, count) in sums.items()
        if count
    }
    return found or None


def _ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return few clients by number; many by their most frequent class, evenly thinned."""
    if len(rows) <= MAX_NAMED_ROWS:
        return list(rows)
    stride = -(-len(rows) // _MAX_ROWS)

    def key(row: dict[str, Any]) -> tuple[int, float]:
        most = max(row["labels"])
        return row["labels"].index(most), -most / max(1, sum(row["labels"]))

    return sorted(rows, key=key)[::stride]


def _label_skew(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean total variation distance between a client's labels and all labels."""
    whole = [sum(counts) for counts in zip(*(row["labels"] for row in rows), strict=True)]
    own = [row["labels"] for row in rows if sum(row["labels"])]
    distances = [
        sum(abs(a - b) for a, b in zip(_shares(counts), _shares(whole), strict=True)) / 2
        for counts in own
    ]
    return sum(distances) / max(1, len(distances))


def _label_map(
    rows: Sequence[dict[str, Any]], classes: Sequence[str], contents: RunContents
) -> Any:
    tips = [
        f"{_who(row, contents)}, {sum(row['labels']):,} examples: "
        + _listed([f"{classes[k]}: {n:,}" for k, n in _largest(row["labels"])])
        for row in rows
    ]
    return _draw(
        "Share of each class in the training examples of each client",
        rows,
        [[share or None for share in _shares(row["labels"])] for row in rows],
        [[f"{count}" if count else "" for count in row["labels"]] for row in rows],
        classes,
        tips,
        contents,
    )


def _accuracy_map(
    rows: Sequence[dict[str, Any]], classes: Sequence[str], contents: RunContents
) -> Any:
    shares = [
        [hits / n if n else None for hits, n in zip(row["correct"], row["held_out"], strict=True)]
        for row in rows
    ]
    tips = [
        f"{_who(row, contents)}: {sum(row['correct']):,} of {sum(row['held_out']):,} right; "
        + _listed(
            [f"{classes[k]}: {row['correct'][k]} of {n}" for k, n in _largest(row["held_out"])]
        )
        for row in rows
    ]
    return _draw(
        "Accuracy of the final model by class on the held-out examples of each client",
        rows,
        shares,
        [["" if one is None else f"{100 * one:.0f}" for one in line] for line in shares],
        classes,
        tips,
        contents,
    )


def _draw(
    label: str,
    rows: Sequence[dict[str, Any]],
    shares: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    classes: Sequence[str],
    tips: Sequence[str],
    contents: RunContents,
) -> Any:
    few = len(rows) <= MAX_NAMED_ROWS
    names = _names(contents)
    return draw_heat_map(
        HeatMap(
            label=label,
            shares=shares,
            texts=texts,
            rows=[names.get(row["client"], str(row["client"])) for row in rows],
            columns=classes,
            tips=tips,
            below="class",
            beside="client" if few else f"{len(rows):,} clients, by their most frequent class",
        )
    )


def _names(contents: RunContents) -> dict[int, str]:
    return {row["client"]: row["name"] for row in contents.clients if row.get("name")}


def _who(row: dict[str, Any], contents: RunContents) -> str:
    name = _names(contents).get(row["client"])
    return f"client {row['client']}" + (f" ({name})" if name else "")


def _largest(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the classes with examples, the most frequent first."""
    present = [(place, count) for place, count in enumerate(counts) if count]
    return sorted(present, key=lambda pair: -pair[1])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _MAX_TIP_CLASSES
    shown = ", ".join(texts[:_MAX_TIP_CLASSES])
    return f"{shown} and {more} more" if more > 0 else shown


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / max(1, sum(counts)) for count in counts]
