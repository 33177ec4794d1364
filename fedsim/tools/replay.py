"""Replay of a run: its federation runs again in memory and is compared with the run's records.

Under secure aggregation the server sees no uploads, so only charges and the model are compared.
A replay imports the plug-ins and reads the data that the experiment names: replay only a run whose
plug-ins you trust.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.clientapp import ClientApp

import fedsim
from fedsim.accountant.ledger.journal import Charge
from fedsim.algorithms.state import ServerState
from fedsim.core.commands import Phases
from fedsim.core.errors import FedsimError, InputError, one_line
from fedsim.core.python_objects import file_instead, is_object_name
from fedsim.experiment import load_experiment
from fedsim.federation.apps import client_app, server_app
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.protocol.arrays import digest
from fedsim.protocol.messages import TrainReply, TrainRequest, Withdrawal
from fedsim.protocol.traffic import ClientError, TrainAnswer
from fedsim.runs.directory import RunDirectory, RunDirectoryError, RunFiles
from fedsim.runs.inputs import refuse_other_inputs
from fedsim.runs.records import Releases, given_up
from fedsim.secagg.errors import AlreadyAnsweredError
from fedsim.server.app import RoundError
from fedsim.server.round_report import RoundReport, RoundRow
from fedsim.server.secure.opened_sums import OpenedSum, OpenedSums
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import DirectChannel, LocalEngine, LocalGrid

# Trackers change no result, and the plug-in file of a user's own tracker may be gone.
_WITHOUT_TRACKERS = {"runtime.trackers": []}
_UNKNOWN = ClientError("nothing of this client was recorded")


class ReplayImpossibleError(InputError):
    """Error that a run cannot be replayed in this environment; the run may still be correct."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    rounds: int  # run again
    uploads: int  # computed again and compared
    charges: int
    problems: tuple[str, ...]  # of the first round with differences, by ascending client; else none


def replay_run(
    directory: RunDirectory, *, base: Path | None = None, phases: Phases | None = None
) -> Replay:
    """Run a federation again and compare its charges, uploads and models with the run's records.

    The experiment's relative paths start in `base`, or in the current directory. A run that cannot
    be replayed here raises a ReplayImpossibleError, which says why.

    Guarantee: if no problem is found, this fedsim computes the same records from the experiment,
    its seed and its data: every charge, the tag (keyed checksum) of every upload, and the digest of
    the global model after every round.
    """
    phases = phases or Phases()
    federation = _federation(directory, base, phases)
    rounds = tuple(_read_recorded(directory))
    _refuse_other_conditions(directory, federation, rounds)
    return _Comparison(directory, federation, rounds, phases).run()


def _federation(directory: RunDirectory, base: Path | None, phases: Phases) -> Federation:
    version = directory.read_version()
    if version != fedsim.__version__:
        raise ReplayImpossibleError(
            f"a run of fedsim {version} cannot be replayed by this one, which may draw other "
            "numbers; replay it with the version that wrote it"
        )
    path = directory.path / "experiment.yaml"
    try:
        loaded = load_experiment(path, _WITHOUT_TRACKERS, base=base or Path())
        if given := next(filter(is_object_name, loaded.experiment.plugins), None):
            raise ReplayImpossibleError(
                f"{given} of this run is a Python object, which only the program that gave it has; "
                f"for a run that can be replayed, {file_instead(given)}"
            )
        federation = assemble(loaded, ledger=None, in_process=True, phases=phases)
    except ReplayImpossibleError:
        raise
    except InputError as error:
        hint = "--base names the directory in which the experiment's relative paths start"
        raise ReplayImpossibleError(f"{one_line(error)}; {hint}") from error
    try:
        refuse_other_inputs(directory.read_inputs(), federation)
    except RunDirectoryError as error:
        text = str(error).partition(",")[0]
        raise ReplayImpossibleError(f"{text}; a replay needs the original") from error
    for client, plan in enumerate(federation.plan.clients or ()):
        if plan.secure_noise:
            raise ReplayImpossibleError(
                f"client {client} has noise: secure, which comes from the operating system and "
                "cannot be repeated; only seeded noise can be replayed"
            )
    return federation


@dataclass(frozen=True)
class _RecordedRound:
    number: int  # from 1
    row: RoundRow  # its line of rounds.jsonl; empty if it was interrupted
    releases: Releases | None  # its line of releases.jsonl; None likewise
    charges: Mapping[int, Charge]  # by client
    uploads: Mapping[int, str]  # tags (keyed checksums) of unencrypted uploads, by client
    participants: frozenset[int]  # clients whose updates are in the average
    asked: frozenset[int]  # clients that trained: with a charge, an upload or an averaged update
    answers: Mapping[int, TrainAnswer]  # failures and withdrawals, by client


def _read_recorded(directory: RunDirectory) -> Iterator[_RecordedRound]:
    """Yield the recorded rounds of a run, from round 1 to the last round with any record."""
    files, charges = RunFiles(directory), defaultdict[int, dict[int, Charge]](dict)
    rows, interrupted = {row["round"]: row for row in files.rounds}, cast("RoundRow", {})
    releases = {release.round: release for release in files.releases}
    for charge in files.all_charges:
        charges[charge.round_number][charge.client] = charge
    last = max([0, *rows, *releases, *charges])
    for number in range(1, last + 1):
        row, released = rows.get(number, interrupted), releases.get(number)
        charged, uploads = charges[number], {} if released is None else released.uploads
        participants = frozenset(row.get("participants", ()))
        asked = participants.union(charged, uploads)
        answers = dict[int, TrainAnswer]()
        for entry in row.get("failed", ()):
            answers[entry["client"]] = ClientError(str(entry["reason"]))
        for entry in row.get("withdrawn", ()):
            answers[entry["client"]] = Withdrawal(entry["client"], str(entry["reason"]))
        yield _RecordedRound(number, row, released, charged, uploads, participants, asked, answers)


class _ReplayGrid(LocalGrid):
    """A local grid that sends training requests only to the clients that trained in the run.

    For the others it repeats what was recorded: failures may have depended on the machine.
    """

    def __init__(
        self, client_app: ClientApp, num_clients: int, *, replay: "_Comparison", **options: Any
    ) -> None:
        super().__init__(client_app, num_clients, **options)
        self._replay = replay

    def direct_channel(self) -> Any:
        """Return this grid, which is the channel of its training requests."""
        return self

    def train(
        self, requests: Mapping[int, TrainRequest], *, timeout: float | None
    ) -> Iterator[tuple[int, TrainAnswer]]:
        """Yield (node id, answer) for each request: a new answer, or the recorded failure."""
        replay, channel = self._replay, cast("DirectChannel", super().direct_channel())
        replay.failures.clear()
        recorded = replay.rounds[replay.finished]
        # In secret participation the record names no participants, so every drawn client trains.
        is_secret = replay.federation.plan.participation.is_secret
        asked = {n: r for n, r in requests.items() if n - FIRST_NODE in recorded.asked}
        for node in requests.keys() - asked.keys():
            yield node, recorded.answers.get(node - FIRST_NODE, _UNKNOWN)
        for node, answer in channel.train(asked, timeout=timeout):
            client = node - FIRST_NODE
            if isinstance(answer, ClientError):
                replay.failures[client] = answer.reason
            released = recorded.uploads if isinstance(answer, TrainReply) else ()
            came = client in (released or recorded.participants) or is_secret
            yield node, answer if came else recorded.answers.get(client, _UNKNOWN)


def _refuse_other_conditions(
    directory: RunDirectory, federation: Federation, rounds: Sequence[_RecordedRound]
) -> None:
    """Refuse a round that ran with other versions or on another kind of device."""
    for round_ in rounds:
        if round_.releases is None or round_.releases.conditions == federation.conditions:
            continue
        packages = directory.read_json("environment.json").get("packages", {})
        now = {"torch": torch.__version__.partition("+")[0], "numpy": np.__version__}
        recorded = {name: str(packages.get(name)).partition("+")[0] for name in now}
        other = [f"{k} {recorded[k]} (here {v})" for k, v in now.items() if recorded[k] != v]
        raise ReplayImpossibleError(
            f"round {round_.number} ran with another "
            f"{' and '.join(other) or 'kind of processor or device, or version of torch or numpy'},"
            " where the last bits may differ; replay it where it ran"
        )


class _EndOfRecordError(Exception):
    """Raised to end the replay: after the last recorded round, or at the first difference."""


@dataclass
class _Comparison:
    """A replay in progress: it runs the federation, is its ledger, and compares each round."""

    directory: RunDirectory
    federation: Federation  # assembled from the run's experiment
    rounds: Sequence[_RecordedRound]
    phases: Phases
    charges: dict[int, list[Charge]] = field(default_factory=dict)  # by client, oldest first
    failures: dict[int, str] = field(default_factory=dict)  # in the current round, by client
    finished: int = 0  # rounds that were compared
    problems: list[str] = field(default_factory=list)

    def run(self) -> Replay:
        reason = "it has no further round"
        if self.rounds:
            self._begin_round()
            try:
                self._execute()
            except _EndOfRecordError:
                pass
            except RoundError as error:
                reason = str(error)
                self.problems += self._differences(error.report)
                self.finished += 1
            except FedsimError as error:
                reason = str(error)
        if self.finished < len(self.rounds) and not self.problems:
            self.problems.append(f"the replay ended after round {self.finished}: {reason}")
        done = self.rounds[: self.finished]
        return Replay(
            rounds=len(done),
            uploads=sum(len(round_.uploads) for round_ in done),
            charges=sum(len(round_.charges) for round_ in done),
            problems=tuple(self.problems),
        )

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        return tuple(self.charges.get(client, [])[after:])

    def append_all(self, charges: Sequence[Charge]) -> None:
        for charge in charges:
            self.charges.setdefault(charge.client, []).append(charge)

    def _begin_round(self) -> None:
        self.phases.begin(f"replaying round {self.finished + 1} of {len(self.rounds)}")

    def _execute(self) -> None:
        federation = replace(self.federation, journal=cast("Any", self))
        server = server_app(
            federation,
            start=ServerState(federation.initial_arrays()),
            on_round=self._on_round,
            on_stop=lambda reason: None,
            ledgers=None,
            opened_sums=OpenedSums(save=self._refuse_used_noise),
            given_up={r.number: why for r in self.rounds if (why := given_up(r.row)) is not None},
        )
        app = client_app(federation, self._block_of)
        LocalEngine(partial(_ReplayGrid, replay=self)).execute(server, app, federation.num_nodes)

    def _refuse_used_noise(self, opened: OpenedSum) -> None:
        """Refuse the noise of a round that the run gave up without it: another sum had got it."""
        row = self.rounds[opened.round_number - 1].row
        reason = given_up(row)
        if reason is not None and row.get("update_norm") is None:
            raise AlreadyAnsweredError(reason, round_number=opened.round_number)

    def _block_of(self, round_number: int, client: int) -> tuple[int, ...]:
        known = [recorded.releases for recorded in self.rounds[:round_number] if recorded.releases]
        if known and known[-1].blocks == "alone":
            return (client,)
        return self.federation.blocks.plan.block_of(round_number, client)

    def _on_round(self, state: ServerState, report: RoundReport) -> None:
        self.problems += self._differences(report)
        self.finished += 1
        is_last = self.finished == len(self.rounds)
        if is_last and not self.problems:
            self.problems += self._final_difference(state)
        if is_last or self.problems:
            raise _EndOfRecordError
        self._begin_round()

    def _differences(self, report: RoundReport) -> Iterator[str]:
        recorded = self.rounds[report.round_number - 1]
        where = f"round {recorded.number}"
        last = [charges[-1] for charges in self.charges.values()]
        charges = {c.client: c for c in last if c.round_number == recorded.number}
        for client in sorted(recorded.asked | charges.keys()):
            difference = _charge_difference(recorded.charges.get(client), charges.get(client))
            replayed, expected = report.clients.uploads.get(client), recorded.uploads.get(client)
            if difference is None and replayed != expected:
                difference = "its upload is not the one that its charge, its seed and its data give"
            if difference is not None:
                failed = self.failures.get(client)
                because = "" if failed is None else f" (it failed in the replay: {failed})"
                yield f"client {client}, {where}: {difference}{because}"
        if recorded.row and set(report.clients.participants) != recorded.participants:
            yield f"{where}: the replay has other participants than rounds.jsonl"
        if recorded.releases is not None and report.model.digest != recorded.releases.model:
            secret = self.federation.plan.participation.is_secret
            because = ", or a client failed: the record names none" if secret else ""
            mean = "the mean of the uploads computed again"
            yield f"{where}: the global model is not {mean}{because}"

    def _final_difference(self, state: ServerState) -> Iterator[str]:
        """Yield a message if the last finished round's model differs from the checkpoint's."""
        checkpoint = self.directory.read_checkpoint()
        if checkpoint is None or checkpoint.state.round_number != state.round_number:
            return
        states = (checkpoint.state, state)
        recorded, replayed = ((digest(s.arrays), digest(s.model)) for s in states)
        if recorded != replayed:
            yield "the final model is not the one of the last round that was computed again"
        elif not self.federation.goal.averages:
            student = self.federation.final_model(state)
            if not self.directory.has_model(student):
                yield "model.safetensors is not the student that is trained on these answers"


def _charge_difference(recorded: Charge | None, replayed: Charge | None) -> str | None:
    if recorded is None:
        return None if replayed is None else "was not charged"
    if replayed is None:
        return "was charged, and not in the replay"
    if recorded.hash == replayed.hash:
        return None
    if recorded.ledger.entries != replayed.ledger.entries or recorded.steps != replayed.steps:
        return "its charge is not that of its plan"
    return "was charged for another answer: another model, block, mechanism or data"
