"""Figures and words that a run computes from its other files: computed again, and compared."""

import math
import statistics
from collections.abc import Iterator
from typing import Any, cast

from fedsim.runs.client_columns import clients_table
from fedsim.runs.directory import RunFiles
from fedsim.runs.recorded_figures import is_scored, public_metrics
from fedsim.runs.recorded_terms import TERMS, recorded_terms
from fedsim.runs.saved_model import read_model_card
from fedsim.runs.verification.spend import number, same_number
from fedsim.server.round_report import numbers_of
from fedsim.statement import read_facts, to_json
from fedsim.statement.privacy_file import ledger_digest

_METRICS = ("test_", "clients_")
_SAME = 1e-6  # relative: a figure of the statement, computed on another machine
_BETWEEN_METHODS = 1e-3  # excess of ε by the server's accountant over a client's own
_EARLY_ENDS = ("stopped", "interrupted", "failed")


def spend_figure_problems(files: RunFiles) -> Iterator[str]:
    """Yield what repeats the clients' ε and differs from them."""
    privacy, rows = files.privacy, files.privacy["clients"]
    if privacy["accountant"] is not None:
        epsilons = [number(row["epsilon"]) for row in rows]
        if not same_number(number(privacy["system_epsilon"]), max(epsilons)):
            yield f"system_epsilon is not the largest ε of any client, {max(epsilons):.6g}"
        expected = {"max": max(epsilons), "median": statistics.median(epsilons)}
        expected |= {"min": min(epsilons)}
        found = files.summary["epsilon"]
        wrong = [name for name in expected if not same_number(number(found[name]), expected[name])]
        if "max" in wrong:
            yield f"summary.json does not name the largest ε, {max(epsilons):.6g}"
        elif wrong:
            yield f"summary.json does not name the {wrong[0]} ε, {expected[wrong[0]]:.6g}"
        if files.summary["delta"] != max(row["delta"] for row in files.clients):
            yield "summary.json does not name the largest δ"
    elif privacy["system_epsilon"] is not None or files.summary["epsilon"] is not None:
        yield "a federation without privacy names an ε"
    table = (files.directory.path / "clients.csv").read_text(encoding="utf-8")
    if table != clients_table(rows):
        yield "clients.csv and privacy.json disagree"


def statement_problems(files: RunFiles) -> Iterator[str]:
    """Yield the differences between the statement and the recorded facts."""
    privacy = files.privacy
    is_private = privacy["accountant"] is not None
    if is_private and privacy.get("ledger_digest") != ledger_digest(privacy["clients"]):
        yield "ledger_digest is not that of the clients' ledgers"
    finite = is_private and all(row["epsilon"] is not None for row in privacy["clients"])
    if privacy["private"] is not finite:
        yield f"privacy.json says private: {privacy['private']}, and its clients say {finite}"
    recorded = {key: value for key, value in privacy.items() if key != "attack"}  # found anew
    for key, expected in to_json(read_facts(recorded)).items():
        if not _alike(privacy.get(key), expected):
            what = "statement" if key.startswith("statement") else key
            yield f"the {what} does not follow from the figures beside it"


def environment_problems(files: RunFiles) -> Iterator[str]:
    """Yield what the files say of version, seed and mechanism, and differs between them."""
    environment, experiment, privacy = files.environment, files.experiment, files.privacy
    files.directory.read_inputs()  # refuses an environment.json that did not begin the run
    if environment["seed"] != experiment.seed:
        yield f"environment.json has seed {environment['seed']}, experiment.yaml {experiment.seed}"
    if environment["fedsim"] != privacy["version"]:
        yield (
            f"environment.json is of fedsim {environment['fedsim']}, privacy.json of "
            f"{privacy['version']}"
        )
    planned, found = recorded_terms(experiment), cast(dict[str, Any], privacy)
    for name in TERMS:
        if found.get(name) != planned.get(name):
            yield (
                f"{name} is {found.get(name)} in privacy.json and {planned.get(name)} in "
                "experiment.yaml"
            )
    if (privacy["secure_aggregation"] is None) != (experiment.secure_aggregation is None):
        yield "privacy.json and experiment.yaml disagree on secure_aggregation"


def model_card_problems(files: RunFiles) -> Iterator[str]:
    """Yield that the header of the final model does not say what the other files say."""
    summary, row = files.summary, files.last_round
    if row is None or not is_scored(summary["status"], summary["rounds"]):
        return
    card = read_model_card(files.directory.path)
    same = (card.experiment, card.rounds, dict(card.metrics), card.statement)
    statement = files.privacy["statement"]
    if same != (summary["name"], summary["rounds"], public_metrics(row), statement):
        yield "the header of model.safetensors does not say what the other files say"


def summary_problems(files: RunFiles) -> Iterator[str]:
    """Yield the figures of `summary.json` that are not those of the rounds."""
    summary, rows, planned = files.summary, files.rounds, files.experiment.federation.rounds
    status, rounds = summary["status"], summary["rounds"]
    if summary["name"] != files.experiment.name:
        yield f"summary.json names {summary['name']!r}, experiment.yaml {files.experiment.name!r}"
    if status not in ("completed", *_EARLY_ENDS):
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
    yield from _epsilon_of_rounds(files)


def _epsilon_of_rounds(files: RunFiles) -> Iterator[str]:
    """Yield a decrease of the largest ε over the rounds, or an excess over the final one."""
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


def _alike(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same, but for the last digits of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=_SAME, abs_tol=_SAME**2)
    return type(one) is type(other) and one == other
