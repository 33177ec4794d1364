"""Report sections on clients' private data, and on the votes of a run with `task: pate`.

The section on private data is left out if the run has differential privacy or secure aggregation.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from fedsim.core.formatting import epsilon_text, metric_text, shortened, some_of
from fedsim.report.chart import Area, Axis, Chart, Note, Point, Tip
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


def client_data_context(contents: RunContents) -> dict[str, Any] | None:
    """Return the template values of the section on private data; None for a report without it."""
    figures = contents.client_data
    if figures is None or contents.facts.is_private or contents.privacy.get("secure_aggregation"):
        return None
    rows = _ordered(figures["clients"])
    scored = [row for row in rows if sum(row.get("held_out", ()))]
    return {
        "note": CLIENT_DATA_NOTE,
        "labels": _label_map(rows, figures["classes"], contents),
        "skew": f"{100 * _label_skew(rows):.0f}%",
        "accuracy": _accuracy_map(scored, figures["classes"], contents) if scored else None,
        "left_out": len(figures["clients"]) - len(rows),
    }


def held_out_accuracies(contents: RunContents) -> dict[int, str] | None:
    """Return the accuracy on each client's held-out examples as text, by client number.

    The result is None if the run measured no such accuracy.
    """
    rows = [] if contents.client_data is None else contents.client_data["clients"]
    sums = {
        row["client"]: (sum(row["correct"]), sum(row["held_out"]))
        for row in rows
        if "held_out" in row
    }
    accuracies = {
        client: metric_text("accuracy", hits / count)
        for client, (hits, count) in sums.items()
        if count
    }
    return accuracies or None


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
    whole = [sum(counts) for counts in zip(*(row["labels"] for row in rows), strict=True)]
    label_counts = [row["labels"] for row in rows if sum(row["labels"])]
    distances = [
        sum(abs(a - b) for a, b in zip(_shares(counts), _shares(whole), strict=True)) / 2
        for counts in label_counts
    ]
    return sum(distances) / max(1, len(distances))


def _label_map(
    rows: Sequence[dict[str, Any]], classes: Sequence[str], contents: RunContents
) -> Markup:
    tips = [
        f"{_who(row, contents)}, {sum(row['labels']):,} examples: "
        + some_of([f"{classes[k]}: {n:,}" for k, n in _largest(row["labels"])], _MAX_TIP_CLASSES)
        for row in rows
    ]
    return _heat_map(
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
) -> Markup:
    shares = [
        [hits / n if n else None for hits, n in zip(row["correct"], row["held_out"], strict=True)]
        for row in rows
    ]
    tips = [
        f"{_who(row, contents)}: {sum(row['correct']):,} of {sum(row['held_out']):,} right; "
        + some_of(
            [f"{classes[k]}: {row['correct'][k]} of {n}" for k, n in _largest(row["held_out"])],
            _MAX_TIP_CLASSES,
        )
        for row in rows
    ]
    return _heat_map(
        "Accuracy of the final model by class on the held-out examples of each client",
        rows,
        shares,
        [["" if share is None else f"{100 * share:.0f}" for share in line] for line in shares],
        classes,
        tips,
        contents,
    )


def _heat_map(
    label: str,
    rows: Sequence[dict[str, Any]],
    shares: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    classes: Sequence[str],
    tips: Sequence[str],
    contents: RunContents,
) -> Markup:
    """Return a heat map of shares in [0, 1], with a row for each client and a column a class.

    A share of None is an empty cell. Cells show their texts where there is room.
    """
    count, size, names = len(rows), len(classes), _names(contents)
    few = count <= MAX_NAMED_ROWS
    clients = [names.get(row["client"], str(row["client"])) for row in rows] if few else []
    beside = "client" if few else f"{count:,} clients, by their most frequent class"
    places = {row + 0.5: shortened(name, _MAX_CHARACTERS) for row, name in enumerate(clients)}
    stride = -(-size // _MAX_TICKS)
    below = {k + 0.5: shortened(classes[k], _MAX_CHARACTERS) for k in range(0, size, stride)}
    upright = sum(map(len, below.values())) > 4 * _MAX_TICKS or max(map(len, below.values())) > 4
    x = Axis(0.0, size, below, "class", upright=upright)
    y = Axis(count, 0.0, places, beside)
    width = min(max(y.room + 8 + size * _COLUMN_PIXELS, _WIDTH_PIXELS[0]), _WIDTH_PIXELS[1])
    has_texts = few and (width - y.room) / size >= _MIN_TEXT_PIXELS
    return inline_svg(
        Chart(
            label=label,
            x=x,
            y=y,
            marks=[*_cells(shares), *(_notes(texts) if has_texts else ())],
            width=width,
            height=count * _ROW_PIXELS if few else _THIN_ROWS_PIXELS,
            top=4,
            right=8,
            tips=[Tip(0, row + 0.5, text) for row, text in enumerate(tips)],
            across=True,
        )
    )


def _cells(shares: Sequence[Sequence[float | None]]) -> Iterator[Area]:
    """Yield one area for each shade, with all cells of that shade."""
    cells: dict[int, list[Point]] = {}
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if share is not None:
                level = max(1, round(share * _LEVELS))  # a share of 0 is not an empty cell
                corners = [(0, 0), (1, 0), (1, 1), (0, 1), (0, math.nan)]
                cells.setdefault(level, []).extend((column + x, row + y) for x, y in corners)
    for level, corners in sorted(cells.items()):
        yield Area(corners, "accent", _STRONGEST * level / _LEVELS)


def _notes(texts: Sequence[Sequence[str]]) -> Iterator[Note]:
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if text:
                yield Note(text, (column + 0.5, row + 0.5), anchor="middle", size=9.5)


def _names(contents: RunContents) -> dict[int, str]:
    return {row["client"]: name for row in contents.clients if (name := row.get("name"))}


def _who(row: dict[str, Any], contents: RunContents) -> str:
    name = _names(contents).get(row["client"])
    return f"client {row['client']}" + (f" ({name})" if name else "")


def _largest(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the classes with examples, the most frequent first."""
    present = [(place, count) for place, count in enumerate(counts) if count]
    return sorted(present, key=lambda pair: -pair[1])


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / max(1, sum(counts)) for count in counts]


def answers_context(contents: RunContents) -> dict[str, Any] | None:
    """Return the template values of the section on votes; None for a run without `task: pate`."""
    answers = contents.optional(ANSWERS)
    if answers is None:
        return None
    return {"rows": [*_counts(answers), *_cost(contents)], "classes": _classes(contents, answers)}


def _counts(answers: dict[str, Any]) -> list[tuple[str, str]]:
    checked, answered = answers["queries_checked"], answers["queries_answered"]
    threshold = answers["threshold"]
    passed = [row for row in answers["queries"] if (row["share"] or 0.0) >= threshold]
    accuracy = answers["label_accuracy"]
    return [
        ("Queries checked", f"{checked:,} of {len(answers['queries']):,}"),
        ("Passed the check", f"{len(passed):,}, with a noisy share of at least {threshold:g}"),
        ("Answered", f"{answered:,}"),
        (
            "Answers that agree with the true label",
            "no answer" if accuracy is None else f"{100 * accuracy:.1f}%",
        ),
    ]


def _cost(contents: RunContents) -> list[tuple[str, str]]:
    votes, facts = contents.privacy.get("votes"), contents.facts
    if votes is None or not facts.is_bounded:
        return []
    spend = contents.clients[0]
    z = spend["noise_multiplier"]
    return [
        ("Noise on a count in a check", f"{z * votes['sigma_threshold']:.4g} votes"),
        ("Noise on a count in a vote", f"{z * votes['sigma']:.4g} votes"),
        (
            "Charged to every client",
            f"{votes['queries']:,} checks and {votes['answers']:,} votes, whatever was answered: "
            f"ε = {epsilon_text(facts.epsilon)}",
        ),
    ]


def _classes(contents: RunContents, answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each true class its name and its numbers of queries, answers and right answers."""
    names = contents.summary.get("classes")
    number = 1 + max((row["true"] for row in answers["queries"]), default=-1)
    table: list[dict[str, Any]] = []
    for label in range(number):
        queries = [row for row in answers["queries"] if row["true"] == label]
        answered = [row for row in queries if row["label"] is not None]
        right = sum(row["label"] == label for row in answered)
        table.append(
            {
                "name": names[label] if names else str(label),
                "queries": len(queries),
                "answered": len(answered),
                "agreement": f"{100 * right / len(answered):.1f}%" if answered else "–",
            }
        )
    return table
