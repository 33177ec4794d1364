"""The plans of all clients: what each does in a round, its settings, its weight, and a digest.

Every party computes the digest from its own experiment: the public facts that fix what every client
releases. Clients bind it into their secure uploads, so a helper opens no sum of uploads with
different plans, and the policy of a node can name the plans that its operator allows.
"""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import fedsim
from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings, is_client
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.client_privacy import ClientPrivacy, Table
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.shared_values import map_shared
from fedsim.data import DataError
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.schedule import StepSchedule, participation_of
from fedsim.protocol.noisy_sums import SumPlan
from fedsim.server.aggregation.weights import (
    WEIGHT_UNITS,
    ClientWeights,
    PlanValues,
    plan_weights,
    uniform_weights,
)


def client_plans(
    experiment: Experiment,
    terms: Sequence[ClientPrivacy],
    sizes: Sequence[int],
    steps: StepSchedule,
    parameters: FlatParameters | None = None,
    problem: object = None,
) -> tuple[PrivacyPlan, ...]:
    """Return the plan of every client as if it added all noise of its claim alone.

    Args:
        experiment: the settings.
        terms: privacy settings of each client.
        sizes: number of examples of each client; unused where the unit is the client.
        steps: the planned steps of each client.
        parameters: of what clients send, for the rounding of the grid; None: not known.
        problem: what a kind of release needs beside settings (see `PlanRequest`); None: not known.

    Raises:
        PrivacyPlanError: no noise meets the settings of a client.
    """
    kind, drawn = experiment.release_kind, steps.participation.secret_rate

    def plan(
        privacy: PrivacySettings, examples: int, planned_rounds: int, planned_steps: int
    ) -> PrivacyPlan:
        request = PlanRequest(
            privacy,
            experiment.local,
            examples=examples,
            planned_rounds=planned_rounds,
            planned_steps=planned_steps,
            parameters=parameters,
            drawn=drawn,
            problem=experiment.ballots or problem,
            kind=kind,
        )
        return plan_privacy(request)

    settings = [own.privacy for own in terms]
    rounds = steps.participation.planned_rounds()
    return tuple(map_shared(plan, settings, sizes, rounds, steps.planned()))


def client_weights(
    experiment: ExperimentWithClients,
    sizes: Sequence[int],
    plans: Sequence[PrivacyPlan] | None,
    *,
    takes_weights: bool,
) -> ClientWeights:
    """Return the weights of all clients.

    A client that leaves when its budget is spent keeps its weight until then.

    Args:
        experiment: the settings.
        sizes: number of examples of each client.
        plans: privacy plan of each client; None without privacy.
        takes_weights: whether the strategy weighs clients; where not, all have the same weight.

    Raises:
        WeightingError: some clients add noise and others none, or no weights keep `max_share`.
    """
    if not takes_weights:
        return uniform_weights(len(sizes))
    secure, units = experiment.secure_aggregation, WEIGHT_UNITS
    if secure is not None and secure.encoding.max_weight != "auto":
        units = min(units, secure.encoding.max_weight)
    values = [*map_shared(PlanValues, sizes)]
    if plans is not None:
        # Where the unit is the client, its size is private, and no weight depends on it.
        values = [*map_shared(_values, plans)]
    return plan_weights(
        experiment.federation.weights,
        values,
        clients_per_round=participation_of(experiment).round_sizes[0],
        units=units,
    )


def ignored_weighting(experiment: Experiment, weights: ClientWeights) -> str | None:
    """Return a line where the strategy ignores `federation.weighting`; None where it does not.

    Args:
        experiment: the settings.
        weights: the weights of the federation.
    """
    federation = experiment.federation
    if federation.weights.is_uniform or weights.name == federation.weights.name:
        return None
    return (
        f"federation.weighting: {federation.weights.name} is ignored, as the strategy "
        f"{federation.algorithm.name} takes no weights"
    )


def _values(plan: PrivacyPlan) -> PlanValues:
    return PlanValues(1 if plan.release.protects_client else plan.examples, _noise(plan))


def _noise(plan: PrivacyPlan) -> float:
    """Return z / q: the noise in a sum over all examples that a step of rate q estimates."""
    return plan.release.noise_multiplier / plan.release.sampling_rate


_SECTIONS = ("federation", "local", "privacy")


def plan_digest(
    experiment: Experiment,
    plans: Sequence[PrivacyPlan] | None,
    weights: ClientWeights,
    sums: SumPlan | None = None,
) -> str:
    """Return the SHA-256 of the privacy plan in hex; "" without privacy.

    It covers the settings of rounds, training, privacy and secure aggregation (m, t, pinned keys),
    the grid of noisy sums, and of each client its weight, sampling rate, noise (with distributed
    trust its share), δ and number of steps. Calibrated numbers count with nine digits, since
    machines may differ in the last ones.

    Args:
        experiment: the settings.
        plans: privacy plan of each client; None without privacy.
        weights: the weights of all clients.
        sums: the plan of noisy sums; None: clients send models or their changes.
    """
    if plans is None:
        return ""
    secure = experiment.secure_aggregation
    content: dict[str, Any] = {
        "fedsim": fedsim.__version__,
        **experiment.model_dump(mode="json", include=set(_SECTIONS)),
        "secure_aggregation": None if secure is None else secure.plan(),
        "weights": list(weights.values),
        "sums": None if sums is None else [_text(sums.unit), sums.server_noise, sums.divisor],
        "clients": [*map_shared(_facts, plans)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _facts(plan: PrivacyPlan) -> list[str | int | None]:
    numbers = (plan.delta, plan.release.sampling_rate, plan.release.noise_multiplier)
    return [plan.examples, plan.steps_to_take, *map(_text, numbers)]


def _text(number: float) -> str:
    return format(number, ".9g")


_CLIENT = "client"


def read_client_tables(privacy: PrivacySettings, base: Path) -> dict[str, Table]:
    """Return the tables of the entries of `privacy.clients` that name a csv file, by entry name.

    An empty cell keeps the value of the `privacy` section.

    Args:
        privacy: the `privacy` section.
        base: the directory in which relative paths start.

    Raises:
        DataError: a file cannot be read, lacks a column, or a cell is not a valid setting; the
            message names the file and the line.
    """
    return {
        name: _read(base / Path(entry.csv).expanduser(), entry)
        for name, entry in privacy.clients.items()
        if entry.csv is not None
    }


def _read(path: Path, entry: ClientPrivacySettings) -> Table:
    table: dict[int, OwnPrivacySettings] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or (), entry)
            for row in reader:
                position = f"{path}:{reader.line_num}"
                client = (row[_CLIENT] or "").strip()
                if not is_client(client):
                    raise DataError(f"{position}: client must be a client number, got {client!r}")
                if int(client) in table:
                    raise DataError(f"{position}: client {client} has two lines; remove one")
                table[int(client)] = _settings(position, row, entry)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a csv file: {error}") from error
    if not table:
        raise DataError(f"{path}: no client has a line; add one line for each client")
    return table


def _check_columns(path: Path, names: Sequence[str], entry: ClientPrivacySettings) -> None:
    for column in (_CLIENT, *entry.columns.values()):
        if column not in names:
            found = ", ".join(names) or "none"
            raise DataError(f"{path}:1: no column {column!r}; columns of the file: {found}")


def _settings(
    position: str, row: Mapping[str, str | None], entry: ClientPrivacySettings
) -> OwnPrivacySettings:
    values: dict[str, float] = {}
    for setting, column in entry.columns.items():
        text = (row[column] or "").strip()
        if not text:
            continue
        try:
            values[setting] = float(text)
        except ValueError:
            raise DataError(f"{position}: {column} must be a number, got {text!r}") from None
    try:
        return OwnPrivacySettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        setting = str(first["loc"][0])
        rule = first["msg"].replace("Input should be", "must be")
        column = next(name for key, name in entry.columns.items() if key == setting)
        raise DataError(f"{position}: {column}: {rule}, got {first['input']}") from None
