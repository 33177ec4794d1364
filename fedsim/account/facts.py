"""Facts about a run in words, for an entry of the registry of deployments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.account.sources import Source, SourceError
from fedsim.account.totals import Account
from fedsim.runs.directory import RunDirectory

_OF_ONE_RUN = frozenset(("guarantee", "result", "delta", "budget", "limit", "mechanism"))


@dataclass(frozen=True)
class RunFacts:
    """What an entry of the registry says about a deployment.

    Attributes:
        name: of the experiment.
        account: totals of its clients.
        points: sentences of the privacy statement, by what they are about.
        releases: how many releases there were, in words.
        utility: metrics of the final model, in words.
        is_simulation: whether a run had seeded noise.
    """

    name: str
    account: Account
    points: Mapping[str, str]
    releases: str
    utility: str
    is_simulation: bool

    def text(self, *points: str) -> str:
        """Return the sentences of some points of the statement; "" without any."""
        return " ".join(self.points[point] for point in points if point in self.points)


def facts_of(account: Account, sources: Sequence[Source]) -> RunFacts:
    """Return the facts of the last finished run of an account.

    Args:
        account: the totals.
        sources: of the account.

    Raises:
        SourceError: no source is a finished run, or a client has an infinite ε.
    """
    runs = [source for source in sources if source.terms is not None and source.is_finished]
    if not runs:
        raise SourceError("--registry needs the directory of a run that has ended")
    if account.to_json()["system_epsilon"] is None:
        raise SourceError("--registry: the largest ε is infinite, which is nothing to register")
    last = RunDirectory.open(Path(runs[-1].name))
    privacy, summary = last.read_json("privacy.json"), last.read_json("summary.json")
    releases = sum(count for _, count in account.largest.ledger.entries)
    name = "" if runs[-1].terms is None else runs[-1].terms.name
    return RunFacts(
        name,
        account,
        _points(privacy.get("statement_points") or [], of_one_run=len(account.sources) == 1),
        f"{len(account.sources)} training runs; up to {releases} noisy releases of one client",
        ", ".join(
            f"{key.replace('_', ' ')} {value:.4g}"
            for key, value in summary.items()
            if key.startswith("test_") and isinstance(value, float)
        ),
        any(source.terms is not None and source.terms.seed is not None for source in sources),
    )


def _points(points: Sequence[Mapping[str, Any]], *, of_one_run: bool) -> dict[str, str]:
    """Return the sentences of each point; those with figures of one run only if it is alone."""
    found: dict[str, str] = {}
    for point in points:
        name = point["point"]
        if name in _OF_ONE_RUN and not of_one_run:
            continue
        found[name] = f"{found[name]} {point['text']}" if name in found else point["text"]
    return found
