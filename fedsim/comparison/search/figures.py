"""The two figures of searches, each with its observer, recomputed from the records alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedsim.accountant import (
    Composed,
    Event,
    RepeatAndSelect,
    SelfComposed,
    UnsupportedEventError,
    make_accountant,
)
from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import MAX_DRAWS, epsilon_with_slack
from fedsim.comparison.search.records import ClientCharge, Search
from fedsim.core.text_formats import finite_or_none


@dataclass(frozen=True)
class Figure:
    """A guarantee of all searches of a directory against one observer.

    Attributes:
        epsilon: the largest ε of any client; infinite where nothing can be proven.
        delta: the largest δ of any client.
        accountant: how ε was composed; pld turns to rdp for events without a PLD.
        clients: (client, ε, δ) of each client.
    """

    epsilon: float
    delta: float
    accountant: AccountantName
    clients: tuple[tuple[int, float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figure as a JSON value; an infinite ε is null."""
        return {
            "epsilon": finite_or_none(self.epsilon),
            "delta": self.delta,
            "accountant": self.accountant,
        }


@dataclass(frozen=True)
class Figures:
    """Both figures of the searches of a directory.

    Attributes:
        every_run: against the server and the clients, who saw every run.
        selected: against an observer of nothing but the selected models.
        runs: number of charged runs, attempts that a crash cut short included.
    """

    every_run: Figure
    selected: Figure
    runs: int


def figures_of(searches: Sequence[Search]) -> Figures:
    """Return both figures of at least one search.

    Guarantee: for each training example of a client, under the adjacency of the searches,
    `every_run` bounds everything that all charged runs released, together; `selected` bounds the
    selected models and their configurations, together. A search without a selection counts in
    `selected` with all of its charged runs.

    Theorem: a run draws a candidate independently of the data and shows which. Its Rényi divergence
    is at most the largest of any candidate (quasi-convexity), which the charge of a run bounds. All
    runs compose; the selection is Theorem 2 or 6 of Papernot, Steinke 2022 (arXiv:2110.03620).
    """
    by_runs = [_Part(search, search.charged_runs, is_selection=False) for search in searches]
    seen = [
        _Part(search, search.drawn.law.most_runs, is_selection=True)
        if search.is_selection
        else part
        for search, part in zip(searches, by_runs, strict=True)
    ]
    return Figures(
        every_run=_figure(by_runs, "pld"),
        selected=_figure(seen, "rdp"),
        runs=sum(part.runs for part in by_runs),
    )


@dataclass(frozen=True)
class _Part:
    """One search as an observer sees it.

    Attributes:
        search: the search.
        runs: its charged runs; of a selection, the number that is not exceeded (`TAIL`).
        is_selection: whether the observer sees the selected model alone.
    """

    search: Search
    runs: int
    is_selection: bool

    @property
    def draws(self) -> int:
        """Most values of noise that a client draws."""
        return self.runs * self.search.drawn.draws

    def releases(self, charge: ClientCharge) -> tuple[tuple[Event, int], ...]:
        """Return what a client is charged with, as (event, count)."""
        entries = charge.events.entries
        if not self.is_selection:
            return tuple((event, count * self.runs) for event, count in entries)
        if not entries:
            return ()
        run = Composed(tuple(SelfComposed(event, count) for event, count in entries))
        drawn = self.search.drawn
        return ((RepeatAndSelect(run, drawn.mean, drawn.shape), 1),)


def _figure(parts: Sequence[_Part], accountant: AccountantName) -> Figure:
    """Return the guarantee of all parts together.

    The slack of the sampler is proven for `MAX_DRAWS` values of noise. Half of them are kept for
    the case that a selection has more runs than `most_runs`, whose probability is far below what
    the other half may add to δ.
    """
    is_proven = sum(part.draws for part in parts) <= MAX_DRAWS // 2
    adjacency = parts[-1].search.drawn.adjacency
    clients = []
    for client in range(len(parts[-1].search.drawn.clients)):
        charges = [part.search.drawn.clients[client] for part in parts]
        delta = max(charge.delta for charge in charges)
        entries = tuple(
            entry
            for part, charge in zip(parts, charges, strict=True)
            for entry in part.releases(charge)
        )
        epsilon = _epsilon(entries, delta, accountant, adjacency) if is_proven else math.inf
        clients.append((client, epsilon, delta))
    return Figure(
        epsilon=max(epsilon for _, epsilon, _ in clients),
        delta=max(delta for _, _, delta in clients),
        accountant=accountant,
        clients=tuple(clients),
    )


@lru_cache(maxsize=4096)  # clients of one size are charged alike
def _epsilon(
    entries: tuple[tuple[Event, int], ...],
    delta: float,
    accountant: AccountantName,
    adjacency: Adjacency,
) -> float:
    """Return ε with the sampler's slack; by Rényi DP where the accountant has no rule."""
    account = make_accountant(accountant, adjacency=adjacency)
    try:
        for event, count in entries:
            account.compose(event, count)
    except UnsupportedEventError:
        if accountant == "rdp":
            raise
        return _epsilon(entries, delta, "rdp", adjacency)
    return epsilon_with_slack(account.get_epsilon, delta)
