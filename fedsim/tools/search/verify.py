"""Checks of a directory of searches: ledger, recomputed guarantees and public folders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fedsim.runs.files import alike, find_object
from fedsim.tools.search.ledger import (
    ACCOUNT,
    MARKER,
    PATH,
    PUBLIC,
    WORK,
    Search,
    SearchLedger,
    SearchLedgerError,
    Selected,
    public_folder,
)
from fedsim.tools.search.outputs import (
    SELECTION,
    account_json,
    account_page,
    digests_of,
    selection_json,
)

UNCHECKED = (
    "that the number of runs was drawn from the stated distribution and that no other ledger was "
    "thrown away: no record can show it; the root of a ledger that was kept elsewhere shows later "
    "changes",
    "that the score is that of the model: it takes the test set",
)
_ENTRIES = {".lock", MARKER, ACCOUNT, PUBLIC}
_RELATIVE = 1e-9  # the same figure on another machine


@dataclass(frozen=True)
class SearchVerification:
    """The result of checking a directory of searches."""

    problems: tuple[str, ...]  # a line for each mistake
    root: str | None = None  # hash of the ledger's last record; None if the ledger cannot be read
    statement: tuple[str, ...] = ()  # both guarantees, recomputed from the ledger
    unchecked: tuple[str, ...] = UNCHECKED


def verify_if_search(out: Path, *, root: str | None, replay: bool) -> SearchVerification | None:
    """Check a directory of searches; return None for any other path."""
    if not ((out / PATH).is_file() or (out / MARKER).is_file()):
        return None
    if replay:
        raise click.BadParameter("the runs of a search are destroyed", param_hint="--replay")
    return verify_search(out, root=root)


def verify_search(out: Path, *, root: str | None = None) -> SearchVerification:
    """Check every file of a directory of searches, and return the result.

    `root` is the hash of the last record as it was kept elsewhere.

    Guarantee: in a sound result, the records form an unbroken chain that charges every search
    before its first run. Every search has ended, with all of its drawn runs or without a selection.
    Both guarantees in the account and the guarantee in every public folder are those of the ledger.
    The public folders hold the recorded files and nothing else, and no run is left on disk.
    """
    try:
        ledger = SearchLedger(out)
    except SearchLedgerError as error:
        return SearchVerification((str(error),))
    if not ledger.searches:
        problem = f"{PATH} is missing or empty: no search was drawn, or its ledger was removed"
        return SearchVerification((problem,))
    problems = list(_problems(out, ledger))
    if root is not None and root.lower() != ledger.head:
        problems.append(f"the last record is {ledger.head}, not the given {root.lower()}")
    content = account_json(ledger.searches, name="", head=ledger.head)
    return SearchVerification(tuple(problems), ledger.head, tuple(content["statement"]))


def _problems(out: Path, ledger: SearchLedger) -> Iterator[str]:
    searches = ledger.searches
    unknown = {path.name for path in out.iterdir()} - _ENTRIES
    yield from (f"{entry}: no file of a search" for entry in sorted(unknown))
    if searches[-1].end is None:
        yield f"search {len(searches)} has not ended; run the same command again to continue it"
        return
    if (out / WORK).exists():
        yield f"{WORK}: runs that must be destroyed are left; run the same command again"
    selections = [search.drawn.search for search in searches if search.is_selection]
    public = {public_folder(out, number).name for number in selections}
    present = {path.name for path in (out / PUBLIC).iterdir()} if (out / PUBLIC).is_dir() else set()
    for name in sorted(present - public):
        yield f"{PUBLIC}/{name}: the ledger has no such selection"
    for number in selections:
        yield from _public_problems(out, searches[:number])
    yield from _account_problems(out, ledger)


def _public_problems(out: Path, searches: Sequence[Search]) -> Iterator[str]:
    folder, end = public_folder(out, len(searches)), searches[-1].end
    where = folder.relative_to(out).as_posix()
    if not isinstance(end, Selected) or not folder.is_dir():
        yield f"{where}: the folder is missing"
        return
    if digests_of(folder) != end.files:
        yield f"{where}: its files are not those of the ledger"
        return
    content = find_object(folder / SELECTION)
    expected = selection_json(searches, score=content.get("score"))
    yield from (f"{where}/{SELECTION}: {key} differs" for key in _differing(content, expected))


def _account_problems(out: Path, ledger: SearchLedger) -> Iterator[str]:
    path = out / ACCOUNT / "comparison.json"
    content = find_object(path)
    expected = account_json(ledger.searches, name=content.get("name", ""), head=ledger.head)
    differing = _differing(content, expected)
    yield from (f"{ACCOUNT}/comparison.json: {key} differs from the ledger" for key in differing)
    if differing:
        return
    page = path.with_suffix(".html")
    if not page.is_file() or page.read_text(encoding="utf-8") != account_page(content):
        yield f"{ACCOUNT}/comparison.html: it is not the page of the account"


def _differing(content: Any, expected: Any) -> list[str]:
    keys = dict.fromkeys([*expected, *content])
    return [k for k in keys if not alike(content.get(k), expected.get(k), relative=_RELATIVE)]
