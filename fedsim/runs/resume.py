"""Checks before a run is resumed: settings that may not change, and files that contradict others.

The files of a run are written in a fixed order. So a file that is lost, shortened or replaced by an
older one contradicts the rest. `--resume` refuses such a run before anything is spent or written;
`fedsim verify` reports it. If all files together are replaced by older ones, only a copy that the
user kept elsewhere shows the replacement.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.experiment import Experiment
from fedsim.experiment.errors import shorten
from fedsim.federation.schedule import participation_of
from fedsim.runs.directory import RunDirectoryError, RunFiles
from fedsim.runs.files import first_lines
from fedsim.server.secure.opened_sums import OpenedSum

_MAY_CHANGE = ("runtime.", "secure_aggregation.on_abort", "secure_aggregation.protocol.combine_")


def resume_command(source: object, overrides: Mapping[str, Any] | Sequence[str], path: Path) -> str:
    """Return the command that continues a run; it names an experiment only by its path."""
    file = str(source) if isinstance(source, str | Path) else "FILE"
    changes = [overrides] if isinstance(overrides, str) else overrides
    if isinstance(changes, Mapping):
        texts = {
            k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in changes.items()
        }
        changes = [f"{key}={text}" for key, text in texts.items()]
    return shlex.join(["fedsim", "run", file, *changes, "--out", str(path), "--resume"])


def refuse_changes(before: Experiment, after: Experiment) -> None:
    """Check that a run may resume with a changed experiment.

    Settings in `runtime`, `secure_aggregation.on_abort` and `protocol.combine_...` may change.
    `federation.rounds` may grow without privacy, with a given `noise_multiplier`, and with
    `input_perturbation`, whose rounds cost nothing. It may not grow with `noise_correlation`, which
    charges the whole run at its start.

    Raises:
        RunDirectoryError: another key changed; the message names it with both values.
    """
    changes = differences(before.model_dump(mode="json"), after.model_dump(mode="json"), "")
    for key, (old, new) in changes.items():
        if key == "federation.rounds":
            _check_rounds(after, old, new)
        elif not key.startswith(_MAY_CHANGE):
            raise RunDirectoryError(
                f"{key} was {_one_line(old)} in the run and is {_one_line(new)} now, and cannot "
                "change on resume: set it back, or start a new run in another --out"
            )


def _one_line(value: object) -> str:
    return shorten(" ".join(str(value).split()))


def _check_rounds(after: Experiment, old: int, new: int) -> None:
    privacy = after.privacy
    if new < old:
        problem = ": rounds can only be added"
    elif privacy is None or after.release_kind.later_rounds_are_free:
        return  # noisy examples are paid for, and rounds cost nothing
    elif not privacy.gives_noise:
        problem = (
            ", but the noise was calibrated to spend the target_epsilon or target_rho of each "
            f"client over {old} rounds: more would exceed it"
        )
    elif privacy.is_correlated:
        problem = (
            f", but noise_correlation charged each client for {old} rounds before the first one: "
            "start a new run in another --out"
        )
    else:
        return
    raise RunDirectoryError(f"federation.rounds was {old} in the run and is {new} now{problem}")


def differences(old: Any, new: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """Return {"key.path": (old, new)} for each value that differs between two nested mappings.

    "absent" is in place of a missing value. `path` is the key path of both in the whole mappings.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {path: (old, new)}
    differing: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        inner = f"{path}.{key}" if path else str(key)
        if key in old and key in new:
            differing |= differences(old[key], new[key], inner)
        else:
            differing[inner] = old.get(key, "absent"), new.get(key, "absent")
    return differing


def contradictions(files: RunFiles, *, ledger_lags: bool = False) -> Iterator[str]:
    """Yield one line of text for each contradiction between the files of a run.

    With `ledger_lags`, clients on other machines keep the charges until the run ends, as in a
    deployment: the ledger is then not compared with the other files.

    A missing or damaged file raises a DamagedRunError, and a damaged ledger a JournalError.
    """
    # All records are read first, so that a damaged one is reported before any are compared.
    _ = files.charges, files.rounds, files.releases, files.checkpoint
    opening = files.directory.read_opening()
    yield from _in_rounds(files)
    yield from _in_releases(files)
    yield from _in_opening(files, opening)
    if files.experiment.privacy is None:
        if files.charges:
            yield "ledger.jsonl has records, and the experiment has no privacy"
    elif not ledger_lags:
        yield from _in_ledger(files)


def _in_rounds(files: RunFiles) -> Iterator[str]:
    numbers = [row["round"] for row in files.rounds]
    finished = 0 if files.state is None else files.state.round_number
    if not files.has_checkpoint:
        finished = len(numbers)
    if numbers != list(range(1, len(numbers) + 1)):
        yield "the rounds in rounds.jsonl are not 1, 2, 3, ..."
    # A round is written to rounds.jsonl first, so at most one is not in the checkpoint.
    if not finished <= len(numbers) <= finished + 1:
        yield (
            f"rounds.jsonl has {len(numbers)} rounds, and the checkpoint is that of round "
            f"{finished}: one of them was lost or replaced"
        )
    elif files.checkpoint is not None:
        run, sealed = files.directory, files.checkpoint
        digests = {run.rounds: sealed.rounds_digest, run.releases: sealed.releases_digest}
        for path, digest in digests.items():
            if digest and hashlib.sha256(first_lines(path, finished)).hexdigest() != digest:
                yield f"{path.name} was changed up to round {finished}, which is in the checkpoint"
    yield from _in_schedule(files)


def _in_schedule(files: RunFiles) -> Iterator[str]:
    """Yield a line for each round with other clients than the schedule asks."""
    schedule, withdrawn = participation_of(files.experiment), set[int]()
    for number, row in enumerate(files.rounds, start=1):
        asked = set(schedule.on_record(number)) - withdrawn
        left = {withdrawal["client"] for withdrawal in row["withdrawn"]}
        failed = [failure["client"] for failure in row["failed"]]
        answers = [*row["participants"], *failed, *sorted(left)]
        secure = row.get("secure_aggregation")  # only such a round can end before clients are asked
        was_given_up = secure is not None and secure["aborted"] is not None
        is_whole = set(answers) == asked or (not answers and was_given_up)
        if len(set(answers)) != len(answers) or not is_whole:
            yield (
                f"round {number}: rounds.jsonl accounts for the clients {sorted(answers)}, and the "
                f"schedule of experiment.yaml asks {sorted(asked)}"
            )
        withdrawn |= left


def _in_releases(files: RunFiles) -> Iterator[str]:
    experiment, rounds, released = files.experiment, len(files.rounds), len(files.releases)
    # A round is written to releases.jsonl first.
    if not rounds <= released <= rounds + 1:
        yield f"rounds.jsonl has {rounds} rounds, and releases.jsonl {released}"
        return
    if experiment.secure_aggregation is not None or experiment.has_server_noise:
        return  # the server sees no update, or no update is a release
    for row, releases in zip(files.rounds, files.releases, strict=False):
        for client in sorted(set(row["participants"]) - releases.uploads.keys()):
            yield (
                f"releases.jsonl lacks the upload of client {client} in round {row['round']}, in "
                "which it took part"
            )


def _in_opening(files: RunFiles, opening: OpenedSum | None) -> Iterator[str]:
    settings, noisy = files.experiment.secure_aggregation, files.experiment.has_server_noise
    if not files.has_checkpoint or (settings is None and not noisy):
        return
    if opening is None:
        yield "checkpoint/opening.json is missing: it names the last opened sum"
        return
    if not noisy and settings is not None and settings.protocol.name == "quantized":
        return  # the server sees every update, and opens no sum
    summed = [row["round"] for row in files.rounds if row["participants"]]
    if opening.round_number < max(summed, default=0):
        yield f"checkpoint/opening.json is older than the sum of round {max(summed)}"


def _in_ledger(files: RunFiles) -> Iterator[str]:
    """Yield each charge that rounds or checkpoint name and that is not in the ledger."""
    heads = {} if files.checkpoint is None else files.checkpoint.heads
    charged = {(charge.client, charge.round_number) for charge in files.all_charges}
    participation = participation_of(files.experiment)
    for row in files.rounds:
        number, clients, why = row["round"], row["participants"], ", in which it took part"
        if participation.is_secret:
            clients = participation.charged_in(number)
            why = ": every client is charged for every round"
        for client in clients:
            if (client, number) not in charged:
                yield f"ledger.jsonl lacks the charge of client {client} in round {number}{why}"
    for client, head in heads.items():
        if all(charge.hash != head for charge in files.charges.get(client, ())):
            yield (
                f"ledger.jsonl lacks the record of client {client} that the checkpoint names as "
                "its last: records were removed or changed"
            )
    finished = 0 if files.state is None else files.state.round_number
    last = max((charge.round_number for charge in files.all_charges), default=0)
    if files.has_checkpoint and last > finished + 1:
        yield (
            f"ledger.jsonl goes on to round {last}, and the checkpoint is that of round "
            f"{finished}: rounds were lost"
        )
