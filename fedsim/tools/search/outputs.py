"""The files of a search: the public folder of the selected model, and the account of the server.

Nothing in the public folder depends on another run, on another score, or on the number of runs.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fedsim.core.durable import sync_directory
from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import SCHEMAS
from fedsim.tools.search.directory import ACCOUNT, public_folder
from fedsim.tools.search.records import Search, Selected, Withdrawn
from fedsim.tools.search.statement import (
    OBSERVER_OF_RUNS,
    OBSERVER_OF_SELECTION,
    every_run_sentence,
    figures_of,
    selection_sentences,
)

MODEL = ("model.safetensors", "experiment.yaml")
SELECTION = "selection.json"


def write_selected(
    out: Path, searches: Sequence[Search], run: Path | None, *, score: float | None
) -> None:
    """Write the public folder of the last search, whole or not at all.

    Args:
        out: the directory of the searches.
        searches: all searches of the directory; the last one as if it had ended with the model.
        run: folder of the selected run; None if no run was drawn.
        score: its metric on the public test set; None if it is not finite, or without a run.
    """
    folder = public_folder(out, len(searches))
    new = folder.with_name(f".{folder.name}.new")
    for left in (new, folder):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(parents=True)
    directory = RunDirectory(new)
    if run is not None:
        for name in MODEL:
            directory.write_bytes(name, (run / name).read_bytes())
    directory.write_json(SELECTION, selection_json(searches, score=score))
    os.replace(new, folder)
    sync_directory(folder.parent)


def selection_json(searches: Sequence[Search], *, score: float | None) -> dict[str, Any]:
    """Return `selection.json`, from the records and the score of the selected run.

    Args:
        searches: all searches up to the one of the folder.
        score: its metric on the public test set.
    """
    last, figures = searches[-1], figures_of(searches)
    drawn, end = last.drawn, last.end
    return {
        "schema": SCHEMAS[SELECTION],
        "fedsim": drawn.fedsim,
        "search": drawn.search,
        "candidates": drawn.candidates,
        "law": {"mean": drawn.mean, "shape": drawn.shape},
        "metric": drawn.metric,
        "selected": end.variant if isinstance(end, Selected) else None,
        "score": score,
        "adjacency": drawn.adjacency,
        "observer": OBSERVER_OF_SELECTION,
        **figures.selected.to_json(),
        "statement": " ".join(selection_sentences(searches, figures)),
        "server": "The server and the clients saw every run. Their figure tells the number of "
        "runs, so it stays in the account of the server.",
    }


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a public folder, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def account_json(searches: Sequence[Search], *, name: str, head: str) -> dict[str, Any]:
    """Return `comparison.json` of the account, from the records alone.

    Args:
        searches: all searches of the directory.
        name: name of the comparison file.
        head: hash of the last record of the ledger.
    """
    figures = figures_of(searches)
    return {
        "schema": SCHEMAS["comparison.json"],
        "fedsim": searches[-1].drawn.fedsim,
        "name": name,
        "for": OBSERVER_OF_RUNS,
        "searches": [_search_json(search) for search in searches],
        "runs": figures.runs,
        "every_run": {"observer": OBSERVER_OF_RUNS, **figures.every_run.to_json()},
        "selection": {"observer": OBSERVER_OF_SELECTION, **figures.selected.to_json()},
        "clients": [
            {"client": client, "delta": delta, "epsilon_every_run": one, "epsilon_selection": other}
            for (client, one, delta), (_, other, _) in zip(
                _finite(figures.every_run.clients), _finite(figures.selected.clients), strict=True
            )
        ],
        "statement": [every_run_sentence(figures), *selection_sentences(searches, figures)],
        "head": head,
    }


def write_account(content: Mapping[str, Any], out: Path) -> None:
    """Write `comparison.json` and `comparison.html` of the account.

    Args:
        content: as `account_json` returned it.
        out: the directory of the searches.
    """
    directory = RunDirectory(out / ACCOUNT)
    directory.write_json("comparison.json", content)
    directory.write_text("comparison.html", account_page(content))


def account_page(content: Mapping[str, Any]) -> str:
    """Return `comparison.html` of the account."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([here, here.parent.parent / "report"], encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cards = [
        (label, epsilon_text(content[key]["epsilon"]), delta_text(content[key]["delta"]), observer)
        for key, label, observer in (
            ("every_run", "Every run", OBSERVER_OF_RUNS),
            ("selection", "The selected model alone", OBSERVER_OF_SELECTION),
        )
    ]
    page = environment.get_template("search.html.jinja").render(
        **content, figures=cards, version=content["fedsim"]
    )
    return page.encode(errors="replace").decode()


def _search_json(search: Search) -> dict[str, Any]:
    end = search.end
    return {
        "search": search.drawn.search,
        "law": {"mean": search.drawn.mean, "shape": search.drawn.shape},
        "candidates": search.drawn.candidates,
        "runs": search.drawn.runs,
        "charged_runs": search.charged_runs,
        "status": "unfinished" if end is None else end.record,
        "selected": end.variant if isinstance(end, Selected) else None,
        "reason": end.reason if isinstance(end, Withdrawn) else None,
    }


def _finite(
    clients: Sequence[tuple[int, float, float]],
) -> list[tuple[int, float | None, float]]:
    return [(client, None if e == float("inf") else e, delta) for client, e, delta in clients]
