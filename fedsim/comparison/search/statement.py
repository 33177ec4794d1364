"""The two figures of a search in words, each with its observer and its conditions."""

from collections.abc import Sequence

from fedsim.accountant.rdp.selection import law_text
from fedsim.comparison.search.figures import Figure, Figures
from fedsim.comparison.search.records import Search, Withdrawn
from fedsim.core.formatting import delta_text, epsilon_text

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


def every_run_sentence(figures: Figures) -> str:
    """Return the figure of all runs with its observer."""
    figure = figures.every_run
    method = {"pld": "PLD composition", "rdp": "Rényi composition"}.get(figure.accountant, "")
    runs = "the one charged run is" if figures.runs == 1 else f"all {figures.runs} charged runs are"
    together = "" if figures.runs == 1 else ", together,"
    if figures.runs == 0:
        return f"Against {OBSERVER_OF_RUNS}: no run was drawn, so nothing was spent: ε = 0."
    return (
        f"Against {OBSERVER_OF_RUNS}: {runs}{together} {_pair(figure)} for each training example "
        f"of every client ({method}). An attempt that a crash cut short counts as a run."
    )


def selection_sentences(searches: Sequence[Search], figures: Figures) -> tuple[str, ...]:
    """Return the figure of the selection with its observer; nothing in it depends on other runs.

    Args:
        searches: all searches of the directory; the last one has ended.
        figures: their figures.
    """
    last = searches[-1]
    if isinstance(last.end, Withdrawn):
        return (
            "No selection is claimed: the search ended without a model, and all of its charged "
            "runs count against every observer.",
        )
    if last.end is None:
        return (
            "No selection is claimed yet: the search has not ended, and until then all of its "
            "charged runs count against every observer.",
        )
    drawn = last.drawn
    theorem = "Theorem 6" if drawn.shape is None else "Theorem 2"
    what = "the selected model is" if len(searches) == 1 else _several(searches)
    return (
        f"Against {OBSERVER_OF_SELECTION}: {what} {_pair(figures.selected)} for each training "
        f"example of every client (Papernot, Steinke 2022, {theorem}, by Rényi DP). The figure "
        "covers every number of runs that could have been drawn, so it may be above that of the "
        "runs that were.",
        f"The number of runs was drawn once from {law_text(drawn.mean, drawn.shape)} by the "
        "operating system and charged before the first run. Every run drew its configuration anew, "
        "uniformly and with replacement. All other runs and scores are destroyed.",
        _CONDITIONS,
    )


def _several(searches: Sequence[Search]) -> str:
    unclaimed = sum(not search.is_selection for search in searches)
    if not unclaimed:
        return f"the models selected by the {len(searches)} searches here are, together,"
    counted = "one search" if unclaimed == 1 else f"{unclaimed} searches"
    return (
        f"the models selected by the {len(searches)} searches here are, together with all charged "
        f"runs of {counted} that ended without a model,"
    )


def _pair(figure: Figure) -> str:
    return f"(ε, δ)-DP with ε ≤ {epsilon_text(figure.epsilon)} at δ = {delta_text(figure.delta)}"
