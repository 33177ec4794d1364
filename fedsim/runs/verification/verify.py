"""The check of a whole run: its manifest first, then its files against each other."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedsim.runs.directory import RunDirectory, RunFiles
from fedsim.runs.manifest import (
    FILE,
    ManifestError,
    changed_files,
    read_manifest,
    uncovered_folders,
)
from fedsim.runs.recorded_figures import FIGURES
from fedsim.runs.verification.figures import (
    environment_problems,
    model_card_problems,
    spend_figure_problems,
    statement_problems,
    summary_problems,
)
from fedsim.runs.verification.plans import (
    charge_problems,
    checkpoint_problems,
    plan_problems,
    schedule_problems,
    unread_tables,
)
from fedsim.runs.verification.spend import Checked, attempt, check_spend, ledger_problems

Check = Callable[[RunFiles], Iterable[str]]


@dataclass(frozen=True)
class Verification:
    """Result of a check.

    Attributes:
        clients: every client whose ε could be recomputed.
        problems: one line for each discrepancy; empty for a sound run.
        unchecked: one line for each fact that could not be checked.
        root: the root of the run's manifest; None without a whole manifest.
    """

    clients: tuple[Checked, ...]
    problems: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    root: str | None = None


# The checks, with the names of the files that they read.
_CHECKS: tuple[tuple[str, Check], ...] = (
    ("privacy.json, summary.json and clients.csv", spend_figure_problems),
    ("privacy.json", statement_problems),
    ("environment.json, experiment.yaml and privacy.json", environment_problems),
    ("rounds.jsonl, checkpoint and ledger.jsonl", schedule_problems),
    ("rounds.jsonl and ledger.jsonl", charge_problems),
    ("checkpoint/model.safetensors and rounds.jsonl", checkpoint_problems),
    ("summary.json and rounds.jsonl", summary_problems),
    *((f"{one.name}, {one.held_against}", one.problems) for one in FIGURES),
    ("model.safetensors, summary.json, rounds.jsonl and privacy.json", model_card_problems),
    ("experiment.yaml, privacy.json and ledger.jsonl", plan_problems),
)


def verify_run(
    directory: RunDirectory, *, root: str | None = None, pages: bool = True
) -> Verification:
    """Check every file of a run that has ended.

    Guarantee: in a sound result every file is the one that `manifest.json` lists, and there is no
    other file outside of trackers' folders. The records of every client form an unbroken chain up
    to the head in `privacy.json`, and the ledgers there are their sums. Two accountants confirm
    every reported ε: the run's own to equality, the looser one by a larger bound. Every
    participation in `rounds.jsonl` has its record, and every record has the sampling rate, the
    noise, the δ and the steps that `experiment.yaml` plans for the recorded client sizes.

    A forger who rewrites all files consistently, the manifest included, is found by `root` alone.

    Args:
        directory: the run directory.
        root: the root of the manifest that was kept elsewhere; None: it is not compared.
        pages: whether pages such as `report.html` are checked.

    Raises:
        DamagedRunError: `environment.json` is missing or damaged.
        SchemaError: the run has another schema, so none of the checks is about it.
    """
    directory.read_version()
    files = RunFiles(directory)
    if not any((directory.path / name).exists() for name in ("summary.json", FILE)):
        return Verification((), (_unfinished(directory),))
    unchecked = [
        f"{folder}/, the files of a tracker, which {FILE} does not cover"
        for folder in uncovered_folders(directory)
    ]
    problems, found_root = _against_manifest(directory, root, pages=pages)
    broken = attempt("ledger.jsonl", lambda: ledger_problems(files))
    if broken:  # nothing else counts before the ledger is whole
        return Verification((), (*problems, *broken), tuple(unchecked), found_root)
    checked: list[Checked] = []
    problems += attempt("privacy.json and ledger.jsonl", lambda: check_spend(files, checked))
    unchecked += attempt("experiment.yaml", lambda: unread_tables(files))
    for names, check in _CHECKS:
        problems += attempt(names, lambda check=check: check(files))
    return Verification(
        tuple(checked), tuple(dict.fromkeys(problems)), tuple(unchecked), found_root
    )


def _unfinished(directory: RunDirectory) -> str:
    return (
        "unfinished: it has no summary.json, so it is still running or was killed; finish it with "
        f"fedsim run FILE --out {directory.path} --resume"
    )


def _against_manifest(
    directory: RunDirectory, root: str | None, *, pages: bool
) -> tuple[list[str], str | None]:
    """Return the problems of the files against the manifest, and its root."""
    try:
        manifest = read_manifest(directory)
    except ManifestError as error:
        return [f"{error}; {_ways_out(directory)}"], None
    problems = attempt(FILE, lambda: changed_files(directory, manifest, pages=pages))
    if root is not None and root.lower() != manifest.root:
        problems.append(f"the root of its records is {manifest.root}, not the given {root.lower()}")
    return problems, manifest.root


def _ways_out(directory: RunDirectory) -> str:
    return (
        "every run ends with one, so it was removed or changed, or the run was killed at its "
        "very end: restore it from a copy, or let fedsim run FILE --out "
        f"{directory.path} --resume write it anew for the files as they are now"
    )
