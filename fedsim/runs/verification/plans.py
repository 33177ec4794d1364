"""Checks of recorded clients and rounds against privacy plan, schedule, ledger and checkpoint.

A client's plan is computed again from the settings, the client's recorded size and the schedule. So
these checks find a ledger with more noise, fewer steps or a smaller sampling rate than planned,
even if its hash chains were computed again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from fedsim.accountant import EpsilonDelta, Event, Gaussian, JointGaussian, PrivacyLedger
from fedsim.accountant.ledger.journal import Charge
from fedsim.accountant.ledger.privacy_ledger import events_match
from fedsim.algorithms.state import ServerState
from fedsim.clients.client_settings import OwnPrivacySettings
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.clients.sampling.sampling import Charges
from fedsim.federation.aggregate_noise import share_noise
from fedsim.federation.client_plans import client_plans, client_weights
from fedsim.federation.plan import schedule_of
from fedsim.federation.schedule import ClientPrivacy, StepSchedule, Table
from fedsim.protocol.arrays import digest
from fedsim.runs.directory import RunFiles
from fedsim.runs.recorded_terms import client_terms
from fedsim.runs.resume import contradictions
from fedsim.runs.saved_model import read_model_card
from fedsim.runs.verification.spend import of_client
from fedsim.server.round_report import withdrawal_rounds

_CALIBRATED = 1e-6  # relative difference of a calibrated noise multiplier between machines
_ROUNDED = 1e-9  # relative difference of the noise of all groups together
_GAUSSIANS = (Gaussian, JointGaussian)
_GRID = 0.1  # relative loss of a noise multiplier to the grid; the real loss is far smaller


def plan_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each recorded value of a client that contradicts the recomputed plan."""
    experiment, settings = files.experiment, files.experiment.privacy
    expected, recorded = experiment.num_clients, len(files.privacy["clients"])
    if [row["client"] for row in files.privacy["clients"]] != list(range(expected)):
        yield f"experiment.yaml has {expected} clients, privacy.json other ones ({recorded})"
        return
    if settings is None or files.privacy["accountant"] is None:
        return  # `environment_problems` compares the presence of privacy in both files
    rows, unread = files.clients, _unread_rates(settings)
    terms, schedule = _schedule(files)
    for row, client_privacy, plan in zip(rows, terms, _plans(files, terms, schedule), strict=True):
        if client_privacy.group in unread:
            continue
        history = files.charges.get(row["client"], ())
        yield from of_client(row, _against_plan(files, row, client_privacy, plan))
        yield from of_client(row, _against_steps(row, plan, schedule, history))


def _schedule(files: RunFiles) -> tuple[Sequence[ClientPrivacy], StepSchedule]:
    """Return each client's privacy settings (none without privacy) and the steps."""
    settings = files.experiment.privacy
    tables = {} if settings is None else _tables(settings, files.clients)
    terms, schedule = schedule_of(files.experiment, Path(), _sizes(files), tables=tables)
    return terms or (), schedule


def _sizes(files: RunFiles) -> list[int]:
    return [row["examples"] or 0 for row in files.clients]


def _plans(
    files: RunFiles, terms: Sequence[ClientPrivacy], schedule: StepSchedule
) -> tuple[PrivacyPlan, ...]:
    """Return the plan of every client; with secure sums, its noise is a share of a sum's noise."""
    experiment, settings, sizes = files.experiment, files.experiment.privacy, _sizes(files)
    plans = client_plans(experiment, terms, sizes, schedule)
    if settings is None or settings.trust.name == "local":
        return plans
    weights = client_weights(experiment, sizes, plans, takes_weights=True)
    return share_noise(experiment, terms, plans, weights, {})[0]


def unread_tables(files: RunFiles) -> Iterator[str]:
    """Yield a line for each csv file of privacy settings, as the settings in it are not checked."""
    settings = files.experiment.privacy
    for name, entry in ({} if settings is None else settings.clients).items():
        if entry.csv is not None:
            columns = ", ".join(entry.columns)
            yield f"{columns} of the clients in {name!r}, which come from {entry.csv}"


def _against_plan(
    files: RunFiles, row: Mapping[str, Any], client_privacy: ClientPrivacy, plan: PrivacyPlan
) -> Iterator[str]:
    adapted = {} if files.state is None else files.state.clip_norms
    clip_norm = adapted.get(row["client"], plan.release.adapted_clip_norm)
    if not files.has_checkpoint and clip_norm is not None:  # nothing else has the last one
        norms = row.get("group_clip_norms")
        clip_norm = row["clip_norm"] if norms is None else tuple(norms)
    terms = client_terms(client_privacy, plan, clip_norm)
    for name in dict.fromkeys((*terms, "group_clip_norms", "max_update_norm")):
        stated, value = row.get(name), terms.get(name)
        if stated != value:
            yield f"{name} is {stated} in privacy.json and {value} by experiment.yaml"
    noise, recorded = plan.noise_multiplier, row["noise_multiplier"]
    if client_privacy.privacy.gives_noise and plan.part is None:
        right = recorded == noise
    else:  # the plan, made without a model, has the effective one
        right = noise * (1.0 - _CALIBRATED) <= recorded <= noise * (1.0 + _GRID)
    if not right:
        yield f"noise_multiplier is {recorded:g} in privacy.json and {noise:g} by experiment.yaml"


def _against_steps(
    row: Mapping[str, Any], plan: PrivacyPlan, schedule: StepSchedule, history: Sequence[Charge]
) -> Iterator[str]:
    """Yield the first record of a client that is not the next charge of its plan."""
    noise = row["noise_multiplier"] / plan.noise_factor
    plan = replace(plan, release=replace(cast(Any, plan.release), noise_multiplier=noise))
    taken = 0
    for charge in history:
        where = f"the record of round {charge.round_number}"
        left = math.inf if plan.affordable_steps is None else plan.affordable_steps - taken
        steps = min(schedule.charged_steps(row["client"], charge.round_number), left)
        if charge.steps != steps:
            yield f"{where} has {charge.steps} steps, and experiment.yaml plans {steps}"
            return
        planned = plan.of_round(charge.round_number)
        if not _same_charges(charge.ledger, planned.charges(taken, charge.steps)):
            yield f"{where} is not the charge that experiment.yaml plans"
            return
        if not _same_charges(charge.against_server, planned.server_charges(taken, charge.steps)):
            yield f"{where} is not the charge against the server that experiment.yaml plans"
            return
        taken += charge.steps


def _same_charges(ledger: PrivacyLedger | None, planned: Charges | None) -> bool:
    if ledger is None or planned is None:
        return ledger is None and planned is None
    return events_match(ledger.entries, planned, _same_event)


def _same_event(event: Event, planned: Event) -> bool:
    """Whether an innermost event is the planned one, up to the noise that the grid takes.

    The files do not name the values of the model or their groups. So the noise of all groups
    together is compared, which may be a little less than planned, but not more. For an event that
    has ε in place of noise, ε may be a little more than planned.
    """
    if isinstance(event, EpsilonDelta) and isinstance(planned, EpsilonDelta):
        least, most = planned.epsilon * (1.0 - _ROUNDED), planned.epsilon * (1.0 + _GRID)
        return event.delta == planned.delta and least <= event.epsilon <= most
    if isinstance(event, _GAUSSIANS) and isinstance(planned, _GAUSSIANS):
        noise, nominal = event.noise_multiplier, planned.noise_multiplier
        return nominal * (1.0 - _GRID) <= noise <= nominal * (1.0 + _ROUNDED)
    return event == planned


def _tables(settings: PrivacySettings, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Table]:
    """Return the tables that the experiment names, with the values that `privacy.json` repeats."""
    return {
        name: {
            row["client"]: OwnPrivacySettings.model_validate(
                {key: row[key] for key in entry.columns}
            )
            for row in rows
            if row["group"] == name
        }
        for name, entry in settings.clients.items()
        if entry.csv is not None
    }


def _unread_rates(settings: PrivacySettings) -> set[str]:
    """Return the groups with sampling rates from a csv file; that file is not in the run."""
    return {name for name, entry in settings.clients.items() if "sampling_rate" in entry.columns}


def schedule_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each recorded round or withdrawal that contradicts the schedule."""
    yield from contradictions(files)
    left_in = withdrawal_rounds(files.rounds)
    for row in files.clients:
        number, recorded = left_in.get(row["client"]), row.get("withdrawn_round")
        if recorded != number:
            yield f"client {row['client']}: left in round {number}, by privacy.json in {recorded}"


def charge_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each charge of wrong steps, or of a client that got no training request."""
    if files.experiment.privacy is None:
        return
    terms, steps_of = _schedule(files)
    unread = _unread_rates(files.experiment.privacy)
    unknown = {client for client, own in enumerate(terms) if own.group in unread}
    charges = {(c.client, c.round_number): c.steps for c in files.all_charges}
    for row in files.rounds:
        shortened = {entry["client"]: entry["steps"] for entry in row["shortened"]}
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
    asked = cache(lambda number: set(steps_of.participation.charged_in(number)))
    for client, number in charges:
        if not 1 <= number <= last or client not in asked(number):
            yield f"client {client}: has a record of round {number}, in which it was not asked"


def checkpoint_problems(files: RunFiles) -> Iterator[str]:
    """Yield a line for each difference between the checkpoint and the other files."""
    if not files.has_checkpoint:
        return
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
    if files.experiment.saves_derived_model:  # made from the values; the manifest has its bytes
        is_same = read_model_card(files.directory.path).values == digest(state.model)
    else:
        is_same = files.directory.has_model(state.model)
    if not is_same:
        yield "model.safetensors is not the model of the checkpoint"


def _early_stopping_problems(state: ServerState, files: RunFiles) -> Iterator[str]:
    """Yield each difference between the run and early stopping by the metrics of its rounds."""
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
