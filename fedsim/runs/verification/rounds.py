"""The rounds of an ended run against the schedule, the ledger and the checkpoint.

`fedsim/runs/consistency.py` has what must agree at every moment of a run.
"""

from collections.abc import Iterable, Iterator

from safetensors.numpy import load_file

from fedsim.algorithms.state import ServerState
from fedsim.federation.schedule import participation_of
from fedsim.protocol.arrays import digest, to_numpy
from fedsim.runs.consistency import contradictions
from fedsim.runs.saved_model import read_model_card, same_arrays
from fedsim.runs.verification.plans import step_schedule, unreadable_clients
from fedsim.runs.verification.run_files import RunFiles
from fedsim.server.participation.participation import Participation
from fedsim.server.round_report import RoundRow, withdrawal_rounds


def schedule_problems(files: RunFiles) -> Iterator[str]:
    """Yield every contradiction of the records, and every round without all of its clients."""
    yield from contradictions(files.directory, files.experiment)
    schedule, withdrawn = _schedule(files), set[int]()
    for number, row in enumerate(files.rounds, start=1):
        asked = set(schedule.on_record(number)) - withdrawn
        left = {one["client"] for one in row["withdrawn"]}
        answers = [*row["participants"], *(one["client"] for one in row["failed"]), *sorted(left)]
        is_whole = set(answers) == asked or (not answers and _was_given_up(row))
        if len(set(answers)) != len(answers) or not is_whole:
            yield (
                f"round {number}: rounds.jsonl accounts for the clients {sorted(answers)}, and the "
                f"schedule of experiment.yaml asks {sorted(asked)}"
            )
        withdrawn |= left
    left_in = withdrawal_rounds(files.rounds)
    for row in files.rows:
        number, recorded = left_in.get(row["client"]), row.get("withdrawn_round")
        if recorded != number:
            yield f"client {row['client']}: left in round {number}, by privacy.json in {recorded}"


def charge_problems(files: RunFiles) -> Iterator[str]:
    """Yield every participation with other steps, and every record without its round."""
    if files.experiment.privacy is None:
        return
    journal, steps_of, unknown = files.journal, step_schedule(files), unreadable_clients(files)
    schedule = steps_of.participation
    charges = {
        (charge.client, charge.round_number): charge.steps
        for client in journal.clients()
        for charge in journal.history(client)
    }
    for row in files.rounds:
        shortened = {one["client"]: one["steps"] for one in row["shortened"]}
        for client in row["participants"]:
            steps = charges.get((client, row["round"]))
            if steps is None or client in unknown:
                continue
            reported = shortened.get(client, steps_of.charged_steps(client, row["round"]))
            if steps != reported:
                yield (
                    f"client {client}: {reported} steps in round {row['round']} by rounds.jsonl, "
                    f"{steps} by ledger.jsonl"
                )
    last = len(files.rounds) + (files.summary["status"] in ("failed", "interrupted"))
    for client, number in _not_asked(charges, schedule, last):
        yield f"client {client}: has a record of round {number}, in which it was not asked"


def _not_asked(
    charges: Iterable[tuple[int, int]], schedule: Participation, last: int
) -> list[tuple[int, int]]:
    """Return the (client, round) of charges that no round asked for, in their order.

    Each round is drawn once: a draw takes time for all clients.
    """
    by_round: dict[int, set[int]] = {}
    for client, number in charges:
        by_round.setdefault(number, set()).add(client)
    for number, clients in by_round.items():
        if 1 <= number <= last:
            clients -= set(schedule.charged_in(number))
    return [(client, number) for client, number in charges if client in by_round[number]]


def checkpoint_problems(files: RunFiles) -> Iterator[str]:
    """Yield what the checkpoint has otherwise than the other files."""
    state, rounds = files.state, files.summary["rounds"]
    number = 0 if state is None else state.round_number
    if number != rounds:
        yield f"the checkpoint is of round {number}, and summary.json has {rounds} rounds"
    if state is None:
        return
    counted = [row for row in files.rounds if row["round"] <= number]
    if state.withdrawn != withdrawal_rounds(counted).keys():
        yield "the checkpoint and rounds.jsonl disagree on the clients that withdrew"
    yield from _early_stopping_problems(state, files)
    if not _is_model_of(state, files):
        yield "model.safetensors is not the model of the checkpoint"


def _early_stopping_problems(state: ServerState, files: RunFiles) -> Iterator[str]:
    """Yield what the metrics of the rounds say of early stopping, and the run did otherwise."""
    stopping = files.experiment.federation.early_stopping
    if stopping is None:
        return
    best = None
    for number, row in enumerate(files.rounds[: state.round_number], start=1):
        if (reason := stopping.reason_to_stop(best, number - 1)) is not None:
            yield f"round {number} ran, and early stopping ends the run before it: {reason}"
        best = stopping.next_best(best, row.get(f"test_{stopping.metric}"), number)
    if best != state.best:
        yield f"the checkpoint has {state.best} as the best value and its round, not {best}"


def _is_model_of(state: ServerState, files: RunFiles) -> bool:
    if files.experiment.saves_derived_model:  # made from them; the manifest has its bytes
        return read_model_card(files.directory.path).values == digest(state.model)
    model = load_file(files.directory.path / "model.safetensors")
    return same_arrays(model, to_numpy(state.model))


def _schedule(files: RunFiles) -> Participation:
    return participation_of(files.experiment)


def _was_given_up(row: RoundRow) -> bool:
    """Whether a secure round ended before its clients were asked."""
    secure = row.get("secure_aggregation")
    return secure is not None and secure["aborted"] is not None
