"""The directory of a search, and the ledger that records its drawn, charged and ended runs.

The records of a search are: `drawn`, which charges all of its runs; then `begun` and `done` for
each run; last `selected` or `withdrawn`. A run that a crash cut short gets another `begun` record,
which charges it again.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedsim.accountant.events import Adjacency
from fedsim.accountant.rdp.selection import RunCountDistribution
from fedsim.comparison.load import LoadedComparison
from fedsim.core.durable import ChainedFile, sync_directory
from fedsim.core.errors import ExitCode, FedsimError
from fedsim.core.settings import Probability, Settings, first_mistake
from fedsim.experiment.schema import yaml_text
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import SCHEMAS, check_schema
from fedsim.runs.inputs import PATTERN
from fedsim.runs.records import LedgerField

FILE = "search.jsonl"
PATH = f"account/{FILE}"
MARKER = "search.yaml"
PUBLIC = "selected"
ACCOUNT = "account"
WORK = "account/work"
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SearchLedgerError(FedsimError, ValueError):
    """Error of a search ledger that cannot be trusted; the message names the record."""

    exit_code = ExitCode.FAILED


class ClientCharge(Settings):
    """The charge to one client for one run."""

    client: int = Field(ge=0)
    delta: Probability
    ledger: LedgerField  # the planned events of one run


class SearchPlan(Settings):
    """What every run of a search charges, with digests of what the runs depend on."""

    digest: _Hash  # of everything that the runs depend on
    data: str = Field(pattern=PATTERN)  # keyed digest of the clients' examples and the test set
    candidates: list[str] = Field(min_length=1)  # of the variants; each run draws one of them
    metric: str  # on the public test set, by which the best run is selected
    mean: float = Field(ge=1)  # expected number of runs
    shape: float | None = Field(ge=0)  # η of the negative binomial; None for Poisson
    adjacency: Adjacency
    draws: int = Field(ge=0)  # most noise values that a client draws in one run
    clients: list[ClientCharge] = Field(min_length=1)  # for one run, the same for every candidate

    @property
    def run_counts(self) -> RunCountDistribution:
        """The distribution from which the number of runs is drawn."""
        return RunCountDistribution(self.mean, self.shape)


class Drawn(SearchPlan):
    """The first record of a search; it charges all runs before the first one starts."""

    record: Literal["drawn"] = "drawn"
    schema_number: int = Field(default=SCHEMAS[FILE], alias="schema")
    search: int = Field(ge=1)  # its number in the directory, from 1
    fedsim: str  # version that drew the search
    nonce: _Hash  # random, so that the record's hash does not reveal the number of runs
    configurations: list[Annotated[int, Field(ge=0)]]  # of each run: the index of its candidate

    @property
    def runs(self) -> int:
        """The drawn number of runs."""
        return len(self.configurations)


class _LaterRecord(Settings):
    search: int = Field(ge=1)


class Begun(_LaterRecord):
    """The record that a run begins, or begins again after a crash, which charges it again."""

    record: Literal["begun"] = "begun"
    run: int = Field(ge=0)
    attempt: int = Field(ge=1)


class Done(_LaterRecord):
    """The record that a run ended; `root` is a digest of all files that record the run."""

    record: Literal["done"] = "done"
    run: int = Field(ge=0)
    root: _Hash


class Selected(_LaterRecord):
    """The record that a search ended with a selected model."""

    record: Literal["selected"] = "selected"
    variant: str | None  # None if no run was drawn
    files: dict[str, _Hash]  # SHA-256 of the files that may be published, by name


class Withdrawn(_LaterRecord):
    """The record that a search ended without a model; all of its runs stay charged."""

    record: Literal["withdrawn"] = "withdrawn"
    reason: str


Record = Drawn | Begun | Done | Selected | Withdrawn
RECORDS: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="record")])


@dataclass
class Search:
    """The state of a search according to its records."""

    drawn: Drawn
    attempts: dict[int, int] = field(default_factory=dict)  # by run; above 1 after a crash
    done: dict[int, str] = field(default_factory=dict)  # by run: digest of its records
    end: Selected | Withdrawn | None = None  # None if the search is unfinished

    @property
    def charged_runs(self) -> int:
        """Number of charged runs: the drawn runs, plus one for each time that a run began again."""
        return self.drawn.runs + sum(number - 1 for number in self.attempts.values())

    @property
    def pending(self) -> tuple[int, ...]:
        """The indices of the drawn runs that have not ended."""
        return tuple(run for run in range(self.drawn.runs) if run not in self.done)

    @property
    def is_selection(self) -> bool:
        """Whether the selection is guaranteed: all drawn runs ended, and one was selected."""
        return isinstance(self.end, Selected)

    @property
    def selected(self) -> str | None:
        """Name of the selected candidate; None without a selection, or if no run was drawn."""
        return self.end.variant if isinstance(self.end, Selected) else None


def add_record(searches: list[Search], record: Record) -> str | None:
    """Add a record to the searches before it; return what is wrong with it, or None.

    Guarantee: no search begins before the previous one ended. The number of runs of a search is
    drawn once, and no drawn run is left out of a selection. No run is selected before all drawn
    runs have ended. A wrong record leaves the searches as they were.
    """
    if isinstance(record, Drawn):
        return _draw(searches, record)
    if not searches or record.search != len(searches):
        return f"it belongs to search {record.search}, and {len(searches)} were drawn"
    search = searches[-1]
    if search.end is not None:
        return "its search has ended"
    match record:
        case Begun():
            expected = search.attempts.get(record.run, 0) + 1
            if record.run not in search.pending or record.attempt != expected:
                return f"attempt {record.attempt} of run {record.run} cannot begin"
            search.attempts[record.run] = record.attempt
        case Done():
            if record.run not in search.attempts or record.run in search.done:
                return f"run {record.run} cannot end"
            search.done[record.run] = record.root
        case Selected():
            if search.pending:
                return f"{len(search.pending)} drawn runs have not ended"
            if (record.variant is None) != (search.drawn.runs == 0):
                return "a model is selected if and only if a run was drawn"
            if record.variant is not None and record.variant not in search.drawn.candidates:
                return f"{record.variant!r} is no candidate"
            search.end = record
        case Withdrawn():
            search.end = record
    return None


def _draw(searches: list[Search], record: Drawn) -> str | None:
    if searches and searches[-1].end is None:
        return f"search {len(searches)} has not ended"
    if record.search != len(searches) + 1:
        return f"it is search {record.search} after {len(searches)}"
    before = searches[-1].drawn if searches else record
    if record.data != before.data or len(record.clients) != len(before.clients):
        return "its data are not those of the search before"
    if record.adjacency != before.adjacency:
        return "its adjacency is not that of the search before"
    if any(index >= len(record.candidates) for index in record.configurations):
        return "a drawn configuration is no candidate"
    if [client.client for client in record.clients] != list(range(len(record.clients))):
        return "its clients are not numbered 0, 1, 2, ..."
    searches.append(Search(record))
    return None


class SearchLedger:
    """The ledger of all searches in one directory; only one process at a time may use it.

    Guarantee: as that of `ChainedFile`.

    Raises:
        SearchLedgerError: a record was changed, breaks the hash chain, or contradicts others.
        SchemaError: a record has another schema.
    """

    def __init__(self, out: Path) -> None:
        self._path = out / PATH
        self._chain = ChainedFile(self._path, raises=SearchLedgerError)
        self.searches: list[Search] = []
        for number, content in enumerate(self._chain.records, start=1):
            if content.get("record") == "drawn":
                check_schema(self._path, content)
            try:
                record = RECORDS.validate_python(content)
            except ValidationError as error:
                where, mistake = f"{self._path}, line {number}", first_mistake(error)
                raise SearchLedgerError(f"{where}: not a record: {mistake}") from error
            self._add(record, number)

    @property
    def head(self) -> str:
        """Hash of the last record of the ledger."""
        return self._chain.heads[-1]

    def append(self, record: Record) -> None:
        """Append a record, and force it to disk, unless it contradicts earlier ones."""
        self._add(record, len(self._chain.heads))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._chain.append(record.model_dump(mode="json", by_alias=True))
        sync_directory(self._path.parent)
        sync_directory(self._path.parent.parent)

    def _add(self, record: Record, number: int) -> None:
        problem = add_record(self.searches, record)
        if problem is not None:
            raise SearchLedgerError(f"{self._path}: record {number} ({record.record}): {problem}")


def check_search_directory(out: Path) -> None:
    """Check that a directory is new, empty, or a directory of searches."""
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
    """Write `search.yaml` with the settings of the search; it marks a directory of searches."""
    content = {
        "name": comparison.name,
        "base": comparison.written_base,
        "select": comparison.settings.model_dump()["select"],
        "variants": {variant.name: dict(variant.changes) for variant in comparison.candidates},
    }
    RunDirectory(out).write_text(MARKER, yaml_text(content))


def public_folder(out: Path, search: int) -> Path:
    """Return the folder of a search's selected model; this folder may be published."""
    return out / PUBLIC / f"search-{search}"


def run_folder(out: Path, search: int, run: int) -> Path:
    """Return the folder of one run of a search; the folder exists only during the search."""
    return out / WORK / f"search-{search}" / f"run-{run}"


def destroy_runs(out: Path) -> None:
    """Remove all runs of a search durably; the content of their files is not overwritten."""
    if (out / WORK).exists():
        shutil.rmtree(out / WORK)
        sync_directory(out / ACCOUNT)
