"""Privacy plans and weights of all clients, and the digest of the privacy plan.

The digest covers the public facts that fix what every client releases. Every party computes it from
its copy of the experiment. Clients bind the digest into their secure uploads, so a helper opens no
sum of uploads with different plans. The policy of a node can list the digests of the plans that its
operator allows.
"""

import csv
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import fedsim
from fedsim.algorithms.algorithm import Algorithm
from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings, is_client
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data import DataError
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.federation.schedule import (
    ClientPrivacy,
    StepSchedule,
    Table,
    map_shared,
    participation_of,
)
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
    """Return the privacy plan of every client, made as if no other party added noise.

    Args:
        experiment: the settings.
        terms: the privacy settings of each client.
        sizes: the number of examples of each client; unused where the privacy unit is the client.
        steps: the planned steps of each client.
        parameters: the parameters that clients send; the plan needs their number to bound the
            rounding error of the noise. None where they are not known.
        problem: bounds on examples, or a convex problem, that some kinds of release need (see
            `PlanRequest`); None where they are not known.

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
            separation=steps.participation.separation,
            kind=kind,
        )
        return plan_privacy(request)

    settings = [client_terms.privacy for client_terms in terms]
    rounds = steps.participation.planned_rounds()
    return tuple(map_shared(plan, settings, sizes, rounds, steps.planned()))


def client_weights(
    experiment: ExperimentWithClients,
    sizes: Sequence[int],
    plans: Sequence[PrivacyPlan] | None,
    *,
    takes_weights: bool,
) -> ClientWeights:
    """Return the weights of all clients for averaging their updates.

    A client's weight stays the same until the client withdraws because its budget is spent.

    Args:
        experiment: the settings.
        sizes: the number of examples of each client.
        plans: the privacy plan of each client; None without privacy.
        takes_weights: whether the strategy uses weights; if not, all weights are 1.

    Raises:
        WeightingError: only some of the clients add noise, or no weights keep each client's share
            below `max_share`.
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


def largest_update(
    experiment: Experiment, plans: Sequence[PrivacyPlan], parameters: int, algorithm: Algorithm
) -> float | None:
    """Return a bound on each value of all planned updates, or None if none is known.

    Guarantee: with probability at least 1 - 10⁻⁹, no update of the whole run exceeds the bound. The
    bound is a function of public numbers. It is a power of two, so that all parties compute the
    same one. It is at least 1, since a smaller one would not give an encoded update more bits.

    Args:
        experiment: the settings.
        plans: the privacy plan of each client.
        parameters: the number of values that a client uploads.
        algorithm: the federated algorithm; one that changes local steps has no known bound.
    """
    secure = experiment.secure_aggregation
    uploads_models = secure is not None and secure.encoding.payload == "parameters"
    if uploads_models or algorithm.client() is not None:
        return None
    rounds, local = range(1, experiment.federation.rounds + 1), experiment.local
    rate = max(map(local.learning_rate, rounds))
    optimizer = local.optimizer.model_copy(update={"lr": rate})
    draws = (parameters + 1) * sum(plan.planned_steps for plan in plans)
    bounds = [
        plan.release.largest_update(optimizer, plan.round_steps, chance=_CHANCE / max(draws, 1))
        for plan in plans
    ]
    known = [bound for bound in bounds if bound is not None and math.isfinite(bound)]
    if len(known) < len(bounds):
        return None
    return 2.0 ** math.ceil(math.log2(max(1.0, *known) * _ROUNDED_UP))


def ignored_weighting(experiment: Experiment, weights: ClientWeights) -> str | None:
    """Return a warning if the strategy ignores `federation.weighting`, else None.

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
    """Return the values of a weight; the noise z / q is that of a step's estimate at rate q."""
    noise = plan.release.noise_multiplier / plan.release.sampling_rate
    return PlanValues(1 if plan.release.protects_client else plan.examples, noise)


_CHANCE = 1e-9  # that any update of a run is above the bound of `largest_update`
_ROUNDED_UP = 1.001  # more than float32 adds to an update by rounding
_SECTIONS = ("federation", "local", "privacy")


def plan_digest(
    experiment: Experiment,
    plans: Sequence[PrivacyPlan] | None,
    weights: ClientWeights,
    sums: SumPlan | None = None,
    largest: float | None = None,
) -> str:
    """Return the SHA-256 of the privacy plan in hex; "" for an experiment without privacy.

    The digest covers these facts:

    - the settings of rounds, training, privacy and secure aggregation, with the numbers of parties
      and the pinned keys;
    - the grid on which noisy sums are rounded;
    - each client's weight, sampling rate, noise, δ and number of steps. With distributed trust, the
      noise is the client's share.

    Calibrated numbers enter with nine significant digits, since machines may differ in the rest.

    Args:
        experiment: the settings.
        plans: the privacy plan of each client; None without privacy.
        weights: the weights of all clients.
        sums: the plan of noisy sums; None with local trust.
        largest: the bound on all updates of `value_bound: auto`; None where none is known.
    """
    if plans is None:
        return ""
    secure = experiment.secure_aggregation
    content: dict[str, Any] = {
        "fedsim": fedsim.__version__,
        **experiment.model_dump(mode="json", include=set(_SECTIONS)),
        "secure_aggregation": None if secure is None else secure.plan(),
        "weights": list(weights.values),
        "largest_update": largest,
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
    """Return the clients' own privacy settings from the csv files that `privacy.clients` names.

    The result has a table (settings by client number) for each entry of `privacy.clients` with a
    file, by the entry's name. An empty cell leaves the setting as in the `privacy` section.

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
            columns = ", ".join(names) or "none"
            raise DataError(f"{path}:1: no column {column!r}; columns of the file: {columns}")


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
