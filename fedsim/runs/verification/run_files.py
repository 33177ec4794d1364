"""The files of a run as the checks read them: each when a check asks for it."""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, cast

from safetensors import SafetensorError

from fedsim.accountant.ledger.journal import FileJournal, JournalError
from fedsim.algorithms.state import ServerState
from fedsim.core.errors import FedsimError
from fedsim.experiment import Experiment, read_settings
from fedsim.runs.directory import RunDirectory
from fedsim.server.round_report import RoundRow
from fedsim.statement.privacy_file import PrivacyFile, PrivateClientRow

# What code meets in content that no run wrote: another type, a missing key, an absurd number.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
)


def attempt(files: str, check: Callable[[], Iterable[str]]) -> list[str]:
    """Return the problems that a check finds; content that it cannot read is a problem, too.

    Args:
        files: the names of the files that the check reads, for the message.
        check: yields the problems.
    """
    problems: list[str] = []
    try:
        for problem in check():
            problems.append(problem)
    except FedsimError as error:
        problems.append(str(error))
    except _MALFORMED as error:
        problems.append(f"{files}: no run writes such content: {error!r:.200}")
    return problems


class RunFiles:
    """The files of a run directory, read at most once; a damaged file raises when it is read."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    @cached_property
    def environment(self) -> dict[str, Any]:
        """`environment.json`."""
        return self.directory.read_json("environment.json")

    @cached_property
    def experiment(self) -> Experiment:
        """`experiment.yaml`; what it names outside of the run directory is not looked at."""
        return read_settings(self.directory.path / "experiment.yaml")

    @cached_property
    def privacy(self) -> PrivacyFile:
        """`privacy.json`."""
        return cast(PrivacyFile, self.directory.read_json("privacy.json"))

    @property
    def rows(self) -> list[PrivateClientRow]:
        """The clients of `privacy.json`."""
        return cast(list[PrivateClientRow], self.privacy["clients"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        return self.directory.read_json("summary.json")

    @cached_property
    def rounds(self) -> list[RoundRow]:
        """`rounds.jsonl`."""
        return self.directory.read_rounds()

    @cached_property
    def state(self) -> ServerState | None:
        """The state in `checkpoint/model.safetensors`; None before the first round."""
        found = self.directory.read_checkpoint()
        return None if found is None else found.state

    @cached_property
    def journal(self) -> FileJournal:
        """`ledger.jsonl`: whole, chained records and nothing else.

        Raises:
            JournalError: it is missing, or a record is cut short or changed; the message names it.
        """
        path = self.directory.ledger
        if not path.is_file():
            raise JournalError(f"{path.name} is missing: it holds what every client has spent")
        journal = FileJournal(path)
        records = sum(len(journal.history(client)) for client in journal.clients())
        data = path.read_bytes()
        if data.count(b"\n") != records or (data and not data.endswith(b"\n")):
            raise JournalError(f"{path.name}, record {records + 1}: cut short or changed")
        return journal
