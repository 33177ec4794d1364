"""Checks of a finished run: its files are compared with the manifest and with each other.

`spend.py` compares `ledger.jsonl` and `privacy.json`: chains, sums, every ε recomputed. `plans.py`
compares both with `experiment.yaml` (sampling rate q, noise multiplier z, δ, steps), and
`rounds.jsonl` with schedule, ledger and checkpoint. No file outside of the run directory is
imported or read, since a plug-in or a table may have any content.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args

from fedsim.core.text_formats import is_finite
from fedsim.runs.client_columns import clients_table
from fedsim.runs.directory import KEPT, RunDirectory, RunFiles
from fedsim.runs.files import alike, read_bytes
from fedsim.runs.manifest import FILE, ManifestError, changed_files, read_manifest
from fedsim.runs.recorded_figures import FIGURES, is_scored, public_metrics
from fedsim.runs.recorded_terms import recorded_terms
from fedsim.runs.records import repeated_failures
from fedsim.runs.run_result import Status
from fedsim.runs.saved_model import read_model_card
from fedsim.runs.verification.plans import (
    charge_problems,
    checkpoint_problems,
    plan_problems,
    schedule_problems,
    unread_tables,
)
from fedsim.runs.verification.spend import (
    attempt,
    check_spend,
    ledger_problems,
    number,
    same_number,
)
from fedsim.server.round_report import numbers_of
from fedsim.simulation.settings import TRACKERS
from fedsim.statement import read_facts, to_json
from fedsim.statement.facts import spread_of
from fedsim.statement.privacy_file import PrivacyFile, ledger_digest

_METRICS = ("test_", "clients_")
_SAME = 1e-6  # relative difference of a figure of the statement between machines
_BETWEEN_METHODS = 1e-3  # excess of ε by the server's accountant over a client's accountant


def spend_figure_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each ε or δ of the whole federation that contradicts the clients' values."""
    privacy, rows = files.privacy, files.privacy["clients"]
    if privacy["accountant"] is not None:
        expected = spread_of([number(row["epsilon"]) for row in rows])
        largest = expected["max"]
        if not same_number(number(privacy["system_epsilon"]), largest):
            yield f"system_epsilon is not the largest ε of any client, {largest:.6g}"
        stated = files.summary["epsilon"]
        wrong = [name for name in expected if not same_number(number(stated[name]), expected[name])]
        if wrong:
            name = "largest" if wrong[0] == "max" else wrong[0]
            yield f"summary.json does not name the {name} ε, {expected[wrong[0]]:.6g}"
        if files.summary["delta"] != max(row["delta"] for row in files.clients):
            yield "summary.json does not name the largest δ"
    elif privacy["system_epsilon"] is not None or files.summary["epsilon"] is not None:
        yield "a federation without privacy names an ε"
    if read_bytes(files.directory.path / "clients.csv") != clients_table(rows).encode():
        yield "clients.csv and privacy.json disagree"


def statement_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each difference between the privacy statement and the recorded facts."""
    privacy = files.privacy
    is_private = privacy["accountant"] is not None
    if is_private and privacy.get("ledger_digest") != ledger_digest(privacy["clients"]):
        yield "ledger_digest is not that of the clients' ledgers"
    finite = is_private and all(row["epsilon"] is not None for row in privacy["clients"])
    if privacy["private"] is not finite:
        yield f"privacy.json says private: {privacy['private']}, and its clients say {finite}"
    recorded = {key: value for key, value in privacy.items() if key != "attack"}  # computed again
    for key, expected in to_json(read_facts(recorded)).items():
        if not alike(privacy.get(key), expected, relative=_SAME, absolute=_SAME**2):
            part = "statement" if key.startswith("statement") else key
            yield f"the {part} does not follow from the figures beside it"


def environment_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each version, seed or privacy setting on which two files disagree."""
    environment, experiment, privacy = files.environment, files.experiment, files.privacy
    if files.has_checkpoint:
        files.directory.read_inputs()  # refuses an environment.json that did not begin the run
    if environment["seed"] != experiment.seed:
        yield f"environment.json has seed {environment['seed']}, experiment.yaml {experiment.seed}"
    began, ended = environment["fedsim"], privacy["version"]
    if began != ended:
        yield f"environment.json is of fedsim {began}, privacy.json of {ended}"
    planned, recorded = recorded_terms(experiment), cast(dict[str, Any], privacy)
    for name in (*planned, *sorted(PrivacyFile.__optional_keys__ - planned.keys())):
        stated, value = recorded.get(name), planned.get(name)
        if stated != value:
            yield f"{name} is {stated} in privacy.json and {value} in experiment.yaml"
    if (privacy["secure_aggregation"] is None) != (experiment.secure_aggregation is None):
        yield "privacy.json and experiment.yaml disagree on secure_aggregation"


def model_card_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line if the header of the final model's file contradicts the other files."""
    summary, row = files.summary, files.last_round
    if row is None or not is_scored(summary["status"], summary["rounds"]):
        return
    card, statement = read_model_card(files.directory.path), files.privacy["statement"]
    said = (card.experiment, card.rounds, dict(card.metrics), card.statement)
    if said != (summary["name"], summary["rounds"], public_metrics(row), statement):
        yield "the header of model.safetensors does not say what the other files say"


def summary_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each value of `summary.json` that differs from `rounds.jsonl`."""
    summary, rows, planned = files.summary, files.rounds, files.experiment.federation.rounds
    status, rounds = summary["status"], summary["rounds"]
    if summary["name"] != files.experiment.name:
        yield f"summary.json names {summary['name']!r}, experiment.yaml {files.experiment.name!r}"
    if status not in get_args(Status):
        yield f"summary.json has the status {status!r}"
    if (summary["reason"] is None) != (status == "completed"):
        yield f"a run that {status} has the reason {summary['reason']!r}"
    if status == "completed" and rounds != planned:
        yield f"a completed run has {rounds} of {planned} rounds"
    # A round after which the run failed, or was interrupted, has its row and no checkpoint.
    possible = {rounds, rounds + 1} if status in ("failed", "interrupted") else {rounds}
    if len(rows) not in possible:
        yield f"summary.json has {rounds} rounds, rounds.jsonl {len(rows)}"
    last = numbers_of(cast(dict[str, Any], rows[-1]), _METRICS) if rows else {}
    if numbers_of(summary, _METRICS) != last:
        yield "the metrics of summary.json are not those of the last round"
    if summary["seconds"] != round(sum(row["seconds"] for row in rows), 3):
        yield "the seconds of summary.json are not those of its rounds"
    if summary.get("repeated_failures", []) != repeated_failures(rows):
        yield "the repeated failures of summary.json are not those of its rounds"
    yield from _epsilon_of_rounds(files)


def _epsilon_of_rounds(files: RunFiles) -> Iterator[str]:
    """Yield a problem if the largest ε falls over the rounds, or exceeds the final ε."""
    system = files.privacy["system_epsilon"]
    before = 0.0
    for row in files.rounds:
        if files.privacy["accountant"] is None:
            if row["epsilon_max"] is not None:
                yield f"round {row['round']} of a federation without privacy names an ε"
            continue
        has_charges = before > 0 or row["epsilon_max"] is not None or system is None
        now = number(row["epsilon_max"]) if has_charges else 0.0
        if now < before * (1 - _BETWEEN_METHODS) or now > number(system) + _BETWEEN_METHODS:
            yield f"round {row['round']}: the largest ε of rounds.jsonl cannot be {now:.6g}"
            return
        before = now


def _finite_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each file with NaN or infinity, which Python reads and no run writes."""
    names = ("environment.json", "summary.json", "privacy.json", *(entry.name for entry in FIGURES))
    for name in names:
        if not is_finite(files.optional(name)):
            yield f"{name} has a number that is not finite"


@dataclass(frozen=True)
class Verification:
    """The result of the check of a run; `problems` is empty for a sound run."""

    epsilons: tuple[float, ...]  # of each client, recomputed
    problems: tuple[str, ...]
    unchecked: tuple[str, ...] = ()  # facts that could not be checked
    root: str | None = None  # of the manifest; None if that is missing or damaged


# Each check, with the names of the files that it reads.
_CHECKS: tuple[tuple[str, Callable[[RunFiles], Iterable[str]]], ...] = (
    ("privacy.json, summary.json and clients.csv", spend_figure_problems),
    ("privacy.json", statement_problems),
    ("environment.json, experiment.yaml and privacy.json", environment_problems),
    ("rounds.jsonl, checkpoint and ledger.jsonl", schedule_problems),
    ("rounds.jsonl and ledger.jsonl", charge_problems),
    ("checkpoint/model.safetensors and rounds.jsonl", checkpoint_problems),
    ("summary.json and rounds.jsonl", summary_problems),
    *((f"{figure.name}, {figure.others}", figure.problems) for figure in FIGURES),
    ("model.safetensors, summary.json, rounds.jsonl and privacy.json", model_card_problems),
    ("experiment.yaml, privacy.json and ledger.jsonl", plan_problems),
    ("files of figures", _finite_problems),
)


def verify_run(
    directory: RunDirectory, *, root: str | None = None, pages: bool = True
) -> Verification:
    """Check every file of an ended run, and return the result.

    Guarantee: in a sound result every file is the one that `manifest.json` lists, and there is no
    other file outside of trackers' folders. The records of every client form an unbroken hash
    chain, whose last hash is in `privacy.json`. The ledgers in that file are the sums of the
    records. Two accountants confirm every reported ε: the run's accountant to equality, the looser
    one by a larger bound. Every participation in `rounds.jsonl` has a record. Every record has the
    sampling rate, the noise, the δ and the steps that `experiment.yaml` plans for the recorded
    client sizes.

    Only `root`, a digest of all records that the user kept elsewhere, shows a forgery that rewrites
    all files consistently, the manifest included. With `pages`, pages such as `report.html` are
    checked, too.

    Raises:
        DamagedRunError: `environment.json` is missing or damaged.
        SchemaError: the run has another schema, which these checks do not know.
    """
    directory.read_version()
    files = RunFiles(directory)
    if not any((directory.path / name).exists() for name in ("summary.json", FILE)):
        unfinished = (
            "unfinished: it has no summary.json, so it is still running or was killed; finish it "
            f"with fedsim run FILE --out {directory.path} --resume"
        )
        return Verification((), (unfinished,))
    unchecked = [
        f"{folder}/, the files of a tracker, which {FILE} does not cover"
        for folder in sorted(TRACKERS)
        if (directory.path / folder).is_dir()
    ]
    if not files.has_checkpoint:
        unchecked.append(f"{KEPT}, which was kept back: the final model is not compared with it")
    problems, found_root = _against_manifest(directory, root, pages=pages)
    broken, epsilons = attempt("ledger.jsonl", lambda: ledger_problems(files)), list[float]()
    problems += broken
    if not broken:  # without a whole ledger, other problems mean nothing
        problems += attempt("privacy.json and ledger.jsonl", lambda: check_spend(files, epsilons))
        unchecked += attempt("experiment.yaml", lambda: unread_tables(files))
        for names, check in _CHECKS:
            problems += attempt(names, lambda check=check: check(files))
    found = tuple(dict.fromkeys(problems))
    return Verification(tuple(epsilons), found, tuple(unchecked), found_root)


def _against_manifest(
    directory: RunDirectory, root: str | None, *, pages: bool
) -> tuple[list[str], str | None]:
    """Return the differences between the files and the manifest, and the manifest's root."""
    try:
        manifest = read_manifest(directory)
    except ManifestError as error:
        ways_out = (
            "every run ends with one, so it was removed or changed, or the run was killed at its "
            "very end: restore it from a copy, or let fedsim run FILE --out "
            f"{directory.path} --resume write it anew for the files as they are now"
        )
        return [f"{error}; {ways_out}"], None
    problems = attempt(FILE, lambda: changed_files(directory, manifest, pages=pages))
    if root is not None and root.lower() != manifest.root:
        problems.append(f"the root of its records is {manifest.root}, not the given {root.lower()}")
    return problems, manifest.root
