"""The files that a search writes, and the two guarantees of a search, each against an observer.

Nothing in the public folder depends on a run that was not selected, on its score, or on the number
of runs.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fedsim.accountant import Composed, Event, RepeatAndSelect, SelfComposed
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.rdp.selection import distribution_text
from fedsim.accountant.sampler_slack import MAX_DRAWS
from fedsim.clients.mechanisms.plan import Accounting
from fedsim.core.durable import replace_file, sync_directory
from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.core.text_formats import finite_or_none, json_value
from fedsim.report.html import render_page
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import SCHEMAS
from fedsim.tools.search.ledger import ACCOUNT, Search, Withdrawn, public_folder

MODEL = ("model.safetensors", "experiment.yaml")
SELECTION = "selection.json"
OBSERVER_OF_RUNS = "the server and the clients, who saw every run"
OBSERVER_OF_SELECTION = (
    "an observer who sees nothing but the selected model, its configuration and its score on the "
    "public test set"
)
_CONDITIONS = (
    "It does not hold against anyone who can see an update, a sum, a model of a round, a log, a "
    "ledger or the folder account/, or who can tell the number of runs in another way: time is not "
    "hidden, so an observer of when the search began and ended is not covered. It assumes that no "
    "interruption depended on the data."
)


@dataclass(frozen=True)
class Figure:
    """The guarantee of all searches of a directory against one observer."""

    observer: str
    epsilon: float  # the largest of any client; infinite if nothing can be proven
    delta: float  # the largest of any client
    accountant: AccountantName  # "pld" falls back to Rényi DP for events without a PLD
    clients: tuple[tuple[float, float], ...]  # (ε, δ) of each client, by number

    @property
    def text(self) -> str:
        """The guarantee in words."""
        epsilon, delta = epsilon_text(self.epsilon), delta_text(self.delta)
        return f"(ε, δ)-DP with ε ≤ {epsilon} at δ = {delta}"

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as JSON values, without clients; an infinite ε is null."""
        return json_value({key: value for key, value in vars(self).items() if key != "clients"})


def figure_of(searches: Sequence[Search], *, sees_runs: bool) -> Figure:
    """Return the joint guarantee of one or more searches against an observer.

    Guarantee: the bounds are for each training example of a client, under the adjacency of the
    searches. Against an observer who sees runs (the server and the clients), it bounds everything
    that all charged runs released, together. Against another one, it bounds the selected models and
    their configurations, together. A search without a selection counts with all charged runs.

    Theorem: each run draws its candidate independently of the data, and releases which one it is.
    So the Rényi divergence of a run is at most the largest of any candidate (quasi-convexity), and
    the charge of a run bounds it. If runs are seen, all of them compose. Of a selection, the bound
    is Theorem 2 or 6 of Papernot, Steinke 2022 (arXiv:2110.03620).

    The slack of the sampler is proven for `MAX_DRAWS` values of noise. Half of them are kept for
    the case that a selection has more runs than `most_runs`, whose probability is far below what
    the other half may add to δ.
    """
    accountant: AccountantName = "pld" if sees_runs else "rdp"
    alone = [(search, search.is_selection and not sees_runs) for search in searches]
    draws = 0
    for search, selected in alone:
        runs = search.drawn.run_counts.most_runs if selected else search.charged_runs
        draws += runs * search.drawn.draws
    is_covered, clients = draws <= MAX_DRAWS // 2, list[tuple[float, float]]()
    for client in range(len(searches[-1].drawn.clients)):
        delta = max(search.drawn.clients[client].delta for search in searches)
        releases = (_releases(search, client, is_selection=selected) for search, selected in alone)
        accounting = Accounting(delta, accountant, searches[-1].drawn.adjacency)
        clients.append((accounting.epsilon(chain(*releases)) if is_covered else math.inf, delta))
    epsilon, delta = map(max, zip(*clients, strict=True))
    observer = OBSERVER_OF_RUNS if sees_runs else OBSERVER_OF_SELECTION
    return Figure(observer, epsilon, delta, accountant, tuple(clients))


def _releases(search: Search, client: int, *, is_selection: bool) -> tuple[tuple[Event, int], ...]:
    """Return what a search charges a client, as pairs (event, count)."""
    drawn, entries = search.drawn, search.drawn.clients[client].ledger.entries
    if not is_selection:
        return tuple((event, count * search.charged_runs) for event, count in entries)
    if not entries:
        return ()
    run = Composed(tuple(SelfComposed(event, count) for event, count in entries))
    return ((RepeatAndSelect(run, drawn.mean, drawn.shape), 1),)


def every_run_sentence(figure: Figure, number: int) -> str:
    """Return a sentence on the guarantee of all runs together, against those who see all runs."""
    if number == 0:
        return f"Against {figure.observer}: no run was drawn, so nothing was spent: ε = 0."
    runs = f"all {number} charged runs are, together," if number > 1 else "the one charged run is"
    return (
        f"Against {figure.observer}: {runs} {figure.text} for each training example "
        "of every client (PLD composition). An attempt that a crash cut short counts as a run."
    )


def selection_sentences(searches: Sequence[Search], figure: Figure) -> tuple[str, ...]:
    """Return sentences on a selection's guarantee; runs that were not selected change none."""
    last = searches[-1]
    if not last.is_selection:
        why = " yet: the search has not ended, and until then"
        if last.end is not None:
            why = ": the search ended without a model, and"
        count = "all of its charged runs count against every observer."
        return (f"No selection is claimed{why} {count}",)
    drawn = last.drawn
    theorem = "Theorem 6" if drawn.shape is None else "Theorem 2"
    subject, unclaimed = "the selected model is", sum(not one.is_selection for one in searches)
    if len(searches) > 1:
        counted = "one search" if unclaimed == 1 else f"{unclaimed} searches"
        also = f" with all charged runs of {counted} that ended without a model"
        together = f"together{also if unclaimed else ''}"
        subject = f"the models selected by the {len(searches)} searches here are, {together},"
    return (
        f"Against {figure.observer}: {subject} {figure.text} for each training "
        f"example of every client (Papernot, Steinke 2022, {theorem}, by Rényi DP). The figure "
        "covers every number of runs that could have been drawn, so it may be above that of the "
        "runs that were.",
        f"The number of runs was drawn once from {distribution_text(drawn.mean, drawn.shape)} by "
        "the operating system and charged before the first run. Every run drew its configuration "
        "anew, uniformly and with replacement. All other runs and scores are destroyed.",
        _CONDITIONS,
    )


def write_selected(
    out: Path, searches: Sequence[Search], run: Path | None, *, score: float | None
) -> None:
    """Write the public folder of the last search, which ends so, as a whole or not at all."""
    folder = public_folder(out, len(searches))
    new = folder.with_name(f".{folder.name}.new")
    for left in (new, folder):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(parents=True)
    if run is not None:
        for name in MODEL:
            replace_file(new / name, (run / name).read_bytes())
    RunDirectory(new).write_json(SELECTION, selection_json(searches, score=score))
    os.replace(new, folder)
    sync_directory(folder.parent)


def selection_json(searches: Sequence[Search], *, score: float | None) -> dict[str, Any]:
    """Return the content of `selection.json` of the last search, which selected a model."""
    figure, drawn = figure_of(searches, sees_runs=False), searches[-1].drawn
    return {
        "schema": SCHEMAS[SELECTION],
        "fedsim": drawn.fedsim,
        "search": drawn.search,
        "candidates": drawn.candidates,
        "distribution": {"mean": drawn.mean, "shape": drawn.shape},
        "metric": drawn.metric,
        "selected": searches[-1].selected,
        "score": score,
        "adjacency": drawn.adjacency,
        **figure.to_json(),
        "statement": " ".join(selection_sentences(searches, figure)),
        "server": "The server and the clients saw every run. Their figure tells the number of "
        "runs, so it stays in the account of the server.",
    }


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a public folder, by file name."""
    files = sorted(folder.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def account_json(searches: Sequence[Search], *, name: str, head: str) -> dict[str, Any]:
    """Return the content of `account/comparison.json`, which follows from the records alone."""
    every_run, selected = (figure_of(searches, sees_runs=sees) for sees in (True, False))
    figures = zip(every_run.clients, selected.clients, strict=True)
    runs = sum(search.charged_runs for search in searches)
    sentences = selection_sentences(searches, selected)
    return {
        "schema": SCHEMAS["comparison.json"],
        "fedsim": searches[-1].drawn.fedsim,
        "name": name,
        "for": OBSERVER_OF_RUNS,
        "searches": [
            {
                "search": search.drawn.search,
                "distribution": {"mean": search.drawn.mean, "shape": search.drawn.shape},
                "candidates": search.drawn.candidates,
                "runs": search.drawn.runs,
                "charged_runs": search.charged_runs,
                "status": "unfinished" if search.end is None else search.end.record,
                "selected": search.selected,
                "reason": search.end.reason if isinstance(search.end, Withdrawn) else None,
            }
            for search in searches
        ],
        "runs": runs,
        "every_run": every_run.to_json(),
        "selection": selected.to_json(),
        "clients": [
            {
                "client": client,
                "delta": delta,
                "epsilon_every_run": finite_or_none(epsilon),
                "epsilon_selection": finite_or_none(other),
            }
            for client, ((epsilon, delta), (other, _)) in enumerate(figures)
        ],
        "statement": [every_run_sentence(every_run, runs), *sentences],
        "head": head,
    }


def write_account(content: Mapping[str, Any], out: Path) -> None:
    """Write `comparison.json` and `comparison.html` into the folder `account`."""
    directory = RunDirectory(out / ACCOUNT)
    directory.write_json("comparison.json", content)
    directory.write_text("comparison.html", account_page(content))


def account_page(content: Mapping[str, Any]) -> str:
    """Return the HTML of `account/comparison.html`."""
    texts = {"epsilon_text": epsilon_text, "delta_text": delta_text}
    page = {**content, **texts, "version": content["fedsim"]}
    return render_page("search.html.jinja", page, Path(__file__).parent)
