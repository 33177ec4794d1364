"""Report sections on private data of a run without any protection, and on votes (`task: pate`)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fedsim.core.formatting import epsilon_text, metric_text, shortened, some_of
from fedsim.report.chart import Area, Axis, Chart, Mark, Note, Point
from fedsim.report.contents import RunContents
from fedsim.report.drawing import inline_svg
from fedsim.runs.recorded_figures import ANSWERS, CLIENT_DATA_NOTE

MAX_NAMED_ROWS = 40  # clients up to which a row has a number; with more, rows are thin

_LEVELS = 8  # shades: the cells of one shade are one path of the drawing
_STRONGEST = 0.45  # opacity of a full cell: text on it stays legible, light and dark
_ROW_PIXELS, _COLUMN_PIXELS = 20, 30
_THIN_ROWS_PIXELS = 380  # height of all thin rows together
_WIDTH_PIXELS = (330, 640)
_MIN_TEXT_PIXELS = 27  # width of a cell with a number in it
_MAX_TICKS = 16
_MAX_CHARACTERS = 9
_MAX_TIP_CLASSES = 6
_MAX_ROWS = 500  # rows of a figure: more than pixels would only make the file larger


class _Line(NamedTuple):
    """A row of a heat map; a cell that is not empty has a share in [0, 1] and a text."""

    name: str  # or number of the client
    tip: str
    cells: Mapping[int, tuple[float, str]]  # by column


def client_data_context(contents: RunContents) -> dict[str, Any] | None:
    """Return the template values of the section on private data; None for a report without it."""
    figures = contents.client_data
    if figures is None or contents.facts.is_private or contents.privacy.get("secure_aggregation"):
        return None
    names = {row["client"]: name for row in contents.clients if (name := row.get("name"))}
    rows, classes = _ordered(figures["clients"]), figures["classes"]
    labels = [_label_line(row, classes, names) for row in rows]
    scored = [_accuracy_line(row, classes, names) for row in rows if sum(row.get("held_out", ()))]
    shares = "Share of each class in the training examples of each client"
    accuracies = "Accuracy of the final model by class on the held-out examples of each client"
    return {
        "note": CLIENT_DATA_NOTE,
        "labels": _heat_map(shares, labels, classes),
        "skew": f"{100 * _label_skew(rows):.0f}%",
        "accuracy": _heat_map(accuracies, scored, classes) if scored else None,
        "left_out": len(figures["clients"]) - len(rows),
    }


def held_out_accuracies(contents: RunContents) -> dict[int, str]:
    """Return the accuracy on each client's held-out examples as text; empty if not measured."""
    rows = [] if contents.client_data is None else contents.client_data["clients"]
    return {
        row["client"]: metric_text("accuracy", sum(row["correct"]) / count)
        for row in rows
        if (count := sum(row.get("held_out", ())))
    }


def _ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows to draw: few clients by number, many by most frequent class, evenly thinned."""
    if len(rows) <= MAX_NAMED_ROWS:
        return list(rows)
    stride = -(-len(rows) // _MAX_ROWS)

    def key(row: dict[str, Any]) -> tuple[int, float]:
        most = max(row["labels"])
        return row["labels"].index(most), -most / max(1, sum(row["labels"]))

    return sorted(rows, key=key)[::stride]


def _label_skew(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean total variation distance between a client's labels and all labels."""
    counts = np.array([row["labels"] for row in rows if sum(row["labels"])])
    if not counts.size:
        return 0.0
    shares, whole = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    return float(np.abs(shares - whole).sum(axis=1).mean() / 2)


def _label_line(row: Mapping[str, Any], classes: Sequence[str], names: Mapping[int, str]) -> _Line:
    labels, total = row["labels"], sum(row["labels"])
    cells = {k: (n / total, f"{n}") for k, n in enumerate(labels) if n}
    listed = some_of([f"{classes[k]}: {n:,}" for k, n in _largest(labels)], _MAX_TIP_CLASSES)
    name, who = _who(row, names)
    return _Line(name, f"{who}, {total:,} examples: {listed}", cells)


def _accuracy_line(
    row: Mapping[str, Any], classes: Sequence[str], names: Mapping[int, str]
) -> _Line:
    right, held = row["correct"], row["held_out"]
    shares = {k: right[k] / n for k, n in enumerate(held) if n}
    cells = {k: (share, f"{100 * share:.0f}") for k, share in shares.items()}
    parts = [f"{classes[k]}: {right[k]} of {n}" for k, n in _largest(held)]
    (name, who), listed = _who(row, names), some_of(parts, _MAX_TIP_CLASSES)
    return _Line(name, f"{who}: {sum(right):,} of {sum(held):,} right; {listed}", cells)


def _heat_map(label: str, lines: Sequence[_Line], classes: Sequence[str]) -> Markup:
    """Return a heat map of clients (rows) and classes; cells show texts where there is room."""
    count, size = len(lines), len(classes)
    few = count <= MAX_NAMED_ROWS
    beside = "client" if few else f"{count:,} clients, by their most frequent class"
    named = enumerate(lines if few else ())
    places = {row + 0.5: shortened(line.name, _MAX_CHARACTERS) for row, line in named}
    stride = -(-size // _MAX_TICKS)
    below = {k + 0.5: shortened(classes[k], _MAX_CHARACTERS) for k in range(0, size, stride)}
    upright = sum(map(len, below.values())) > 4 * _MAX_TICKS or max(map(len, below.values())) > 4
    x = Axis(0.0, size, below, "class", upright=upright)
    y = Axis(count, 0.0, places, beside)
    width = min(max(y.room + 8 + size * _COLUMN_PIXELS, _WIDTH_PIXELS[0]), _WIDTH_PIXELS[1])
    has_texts = few and (width - y.room) / size >= _MIN_TEXT_PIXELS
    height = count * _ROW_PIXELS if few else _THIN_ROWS_PIXELS
    areas, notes = _cells(lines)
    marks = [*areas, *notes] if has_texts else areas
    tips = [(row + 0.5, line.tip) for row, line in enumerate(lines)]
    chart = Chart(label, x, y, marks, width, height, top=4, right=8, tips=tips, across=True)
    return inline_svg(chart)


def _cells(lines: Sequence[_Line]) -> tuple[list[Mark], list[Mark]]:
    """Return one area for each shade, with all cells of that shade; and the text of each cell."""
    shades: dict[int, list[Point]] = {}
    notes: list[Mark] = []
    for row, line in enumerate(lines):
        for column, (share, text) in line.cells.items():
            level = max(1, round(share * _LEVELS))  # a share of 0 is not an empty cell
            corners = [(0, 0), (1, 0), (1, 1), (0, 1), (0, math.nan)]
            shades.setdefault(level, []).extend((column + x, row + y) for x, y in corners)
            notes.append(Note(text, (column + 0.5, row + 0.5), anchor="middle", size=9.5))
    areas = [Area(shades[n], "accent", _STRONGEST * n / _LEVELS) for n in sorted(shades)]
    return [*areas], notes


def _who(row: Mapping[str, Any], names: Mapping[int, str]) -> tuple[str, str]:
    """Return a client's name, or else its number, and the text on both in a tooltip."""
    name, client = names.get(row["client"]), f"client {row['client']}"
    return (name, f"{client} ({name})") if name else (str(row["client"]), client)


def _largest(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the classes with examples, the most frequent first."""
    return [(k, n) for k, n in sorted(enumerate(counts), key=lambda pair: -pair[1]) if n]


def answers_context(contents: RunContents) -> dict[str, Any] | None:
    """Return the template values of the section on votes; None for a run without `task: pate`.

    They are the content of `answers.json` with more figures; `votes` only where ε has a guarantee.
    """
    answers, facts = contents.optional(ANSWERS), contents.facts
    if answers is None:
        return None
    votes = contents.privacy.get("votes") if facts.is_bounded else None
    return {
        **answers,
        "passed": sum((row["share"] or 0.0) >= answers["threshold"] for row in answers["queries"]),
        "votes": votes,
        "z": contents.clients[0]["noise_multiplier"] if votes else 0.0,
        "epsilon": epsilon_text(facts.epsilon),
        "classes": _classes(contents, answers),
    }


def _classes(contents: RunContents, answers: dict[str, Any]) -> list[tuple[str, int, int, str]]:
    """Return for each true class its name, its numbers of queries and answers, and agreement."""
    names = contents.summary.get("classes")
    table: list[tuple[str, int, int, str]] = []
    for label in range(1 + max((row["true"] for row in answers["queries"]), default=-1)):
        given = [row["label"] for row in answers["queries"] if row["true"] == label]
        answered = [answer for answer in given if answer is not None]
        agreement = f"{100 * answered.count(label) / len(answered):.1f}%" if answered else "–"
        name = names[label] if names else str(label)
        table.append((name, len(given), len(answered), agreement))
    return table
