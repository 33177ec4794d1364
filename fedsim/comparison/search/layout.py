"""The directory of a search: what may be handed on, and what stays with the server."""

import shutil
from pathlib import Path

import yaml

from fedsim.comparison.file.load import LoadedComparison
from fedsim.comparison.search.ledger import PATH
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import sync_directory

MARKER = "search.yaml"
PUBLIC = "selected"
ACCOUNT = "account"
WORK = "account/work"


def check_search_directory(out: Path) -> None:
    """Check that a directory is new, empty, or one of searches.

    Raises:
        RunDirectoryError: it is none of these, or its ledger is missing.
    """
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"{out} is a file; choose another --out")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    known = (out / MARKER).is_file() or (out / PATH).is_file()
    if names - {f".{MARKER}.tmp"} and not known:  # which a crash may leave
        raise RunDirectoryError(f"{out} is not empty and holds no search; choose another --out")
    if (out / PUBLIC).exists() and not (out / PATH).is_file():
        raise RunDirectoryError(
            f"{out} holds selected models and no {PATH}, which says what they cost: restore it "
            "from a copy, or choose another --out"
        )


def write_marker(comparison: LoadedComparison, out: Path) -> None:
    """Write `search.yaml`: the settings of the search, which mark the directory.

    Args:
        comparison: the loaded file.
        out: the directory.
    """
    select = comparison.settings.select
    content = {
        "name": comparison.name,
        "base": str(comparison.base.absolute()),
        "select": None if select is None else select.model_dump(),
        "variants": {variant.name: dict(variant.changes) for variant in comparison.candidates},
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    RunDirectory(out).write_text(MARKER, text)


def public_folder(out: Path, search: int) -> Path:
    """Return the folder of a selected model, which may be handed on."""
    return out / PUBLIC / f"search-{search}"


def run_folder(out: Path, search: int, run: int) -> Path:
    """Return the folder of a run while the search lasts."""
    return out / WORK / f"search-{search}" / f"run-{run}"


def destroy_runs(out: Path) -> None:
    """Remove all runs and the log of their processes; when this returns, they are gone.

    The names are removed. What a disk keeps of removed files is beyond this program.
    """
    if (out / WORK).exists():
        shutil.rmtree(out / WORK)
        sync_directory(out / ACCOUNT)
