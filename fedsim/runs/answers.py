"""`answers.json` of a run with `task: pate`: the queries, their noisy shares and their labels.

Every figure follows from charged releases and from public labels, so nothing of it is charged.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim.algorithms.state import ServerState
from fedsim.clients.mechanisms.votes.mechanism import NO_LABEL
from fedsim.federation.federation import Federation
from fedsim.pate.board import NOT_CHECKED, labels_of, shares_of
from fedsim.pate.settings import PateSettings
from fedsim.protocol.arrays import to_numpy
from fedsim.runs.files import SCHEMAS

FILE = "answers.json"
COUNTS = ("queries_checked", "queries_answered", "label_accuracy")
"""Keys of a line of `rounds.jsonl` that repeat figures of the file."""


def answers_content(federation: Federation, state: ServerState) -> dict[str, Any] | None:
    """Return the content of the file; None for another task.

    Args:
        federation: of the run.
        state: after its last round.
    """
    voting = federation.voting
    if voting is None:
        return None
    board = to_numpy(state.arrays)
    return {
        "schema": SCHEMAS[FILE],
        **_counted(rows := _rows(board, voting.queries.targets)),
        "threshold": voting.settings.threshold,
        "queries": rows,
    }


def answer_problems(
    content: Mapping[str, Any],
    board: Mapping[str, np.ndarray] | None,
    settings: PateSettings,
    row: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield what `answers.json` says and does not agree with the other files or with itself.

    Args:
        content: the file.
        board: arrays of the checkpoint; None before the first round.
        settings: `pate:` of the experiment.
        row: the last finished line of `rounds.jsonl`; None without one.
    """
    rows = content["queries"]
    if len(rows) != settings.queries or content["threshold"] != settings.threshold:
        yield f"{FILE} has other queries, or another threshold, than experiment.yaml"
        return
    found = {name: content[name] for name in COUNTS}
    if found != _counted(rows):
        yield f"{FILE}: its numbers are not those of its queries"
    if row is not None and found != {name: row[name] for name in COUNTS}:
        yield f"{FILE}: its numbers are not those of the last round"
    if found["queries_answered"] > settings.most_answers:
        yield f"{FILE}: more queries are answered than every client is charged for"
    true = np.array([one["true"] for one in rows], dtype=np.int64)
    if board is not None and _rows(board, true) != rows:
        yield f"{FILE}: shares or labels are not those of the checkpoint"


def _rows(board: Mapping[str, np.ndarray], true: np.ndarray) -> list[dict[str, Any]]:
    """Return one mapping for each query.

    Args:
        board: arrays of the board.
        true: public label of each query (queries,).
    """
    shares, labels = shares_of(board), labels_of(board)
    return [
        {
            "query": query,
            "share": None if share < NOT_CHECKED / 2 else round(float(share), 6),
            "label": None if label == NO_LABEL else label,
            "true": real,
        }
        for query, (share, label, real) in enumerate(
            zip(shares.tolist(), labels.tolist(), true.tolist(), strict=True)
        )
    ]


def _counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    answered = [row for row in rows if row["label"] is not None]
    right = sum(row["label"] == row["true"] for row in answered)
    return {
        "queries_checked": sum(row["share"] is not None for row in rows),
        "queries_answered": len(answered),
        "label_accuracy": right / len(answered) if answered else None,
    }
