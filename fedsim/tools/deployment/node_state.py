"""State of a node on disk, which only its user can read: a client's ledgers or a helper's record.

A client's directory is `STATE/seed-SEED/client-NUMBER`. Another experiment with the same seed would
draw the same noise again, and the difference of the two answers would contain none; so it is
refused.

A helper must release at most one sum of a round. Flower's context cannot ensure this, since it can
be lost, be outdated, or be used by two processes. So each release is on disk before the sum is
sent, in one file for each run: `STATE/helper-NUMBER/SHA-256-OF-THE-RUN.json`. The file holds no
key: a restarted helper has a new one, and cannot open envelopes that were sealed for the old one.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import fedsim
from fedsim.accountant import Event, NonPrivate, PrivacyLedger, UnsupportedEventError
from fedsim.accountant.ledger.journal import Charge, Journal
from fedsim.clients.account import ChargeRefusedError, NoiseReuseError
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.durable import GENESIS
from fedsim.experiment import Experiment
from fedsim.runs.files import SCHEMAS, SchemaError, check_schema, check_version
from fedsim.runs.resume import differences
from fedsim.secagg.errors import AlreadyAnsweredError, ReplayError, SecureAggregationError
from fedsim.server.secure.helper import HelperRelease
from fedsim.tools.deployment.data_ledger import (
    DataCharge,
    DataLedger,
    Releases,
    count_affordable,
    counted_releases,
    open_data_ledger,
)
from fedsim.tools.deployment.policy import NodePolicy
from fedsim.tools.deployment.policy_rules import PolicyRefusalError
from fedsim.tools.deployment.private_files import (
    DeploymentError,
    configured_path,
    exclusive,
    make_private,
    refuse_open,
    write_whole,
)

logger = logging.getLogger("flwr")

_LEDGER = "ledger.jsonl"
_EXPERIMENT = "experiment.json"
_RELEASE = TypeAdapter(HelperRelease)


def state_directory(node_config: Mapping[str, object]) -> Path:
    """Return the state directory: `state` of the configuration, FEDSIM_STATE, or the default."""
    return configured_path(node_config, "state") or Path.home() / ".local" / "state" / "fedsim"


def client_ledger(
    state: Path, experiment: Experiment, client: int, *, claims_seed: bool = False
) -> Path:
    """Return the path of a client's ledger file, which is created if it does not exist.

    With `claims_seed`, also reserve the seed for the experiment on disk, before the client's first
    charge. The file with the experiment is written once: of two processes with different
    experiments, the second is refused. A refused request reserves no seed.

    Guarantee: neither the directories nor the ledger can be read by another user.

    Raises:
        DeploymentError: other users can open a file or directory or own it, or the client answered
            a different experiment with this seed.
        SchemaError: another version of fedsim wrote the state.
    """
    directory = state / f"seed-{experiment.seed}" / f"client-{client}"
    ledger, stored = directory / _LEDGER, directory / _EXPERIMENT
    with exclusive(directory, state=state):
        is_stored = _check_stored(stored, experiment)
        make_private(ledger)
        if claims_seed and not is_stored:
            version = {"fedsim": fedsim.__version__, "schema": SCHEMAS[_EXPERIMENT]}
            content = {**version, "experiment": experiment.model_dump(mode="json")}
            write_whole(stored, json.dumps(content))
    return ledger


@dataclass(frozen=True)
class NodeJournal:
    """A client's durable ledger on a node, which also charges the ledger of the client's data set.

    The ledger of a data set has the charges of all experiments, and is charged first: a crash
    between the two leaves one charge too many, never one too few. A charge is refused if it would
    exceed the budget that the node's policy sets for the data set.

    Guarantee: all charges of one data set together stay within `max_epsilon` at `delta` of the
    policy, against everybody whom the policy does not trust. This also holds for a server that
    chooses each experiment after it saw the earlier answers. A refused charge is in no ledger.
    """

    run_journal: Journal  # the client's ledger of the experiment
    state: Path  # the node's state directory
    data: Path  # directory of the ledger of the data
    policy: NodePolicy
    plan: PrivacyPlan
    experiment: Experiment  # with privacy

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first, without the first `after` charges."""
        return self.run_journal.history(client, after=after)

    def append_all(self, charges: Sequence[Charge]) -> None:
        """Append charges to both ledgers, in their order, if the policy allows all of them.

        Raises:
            PolicyRefusalError: the policy forbids a charge.
            NoiseReuseError: the noise of a round was already used for another answer.
            ChargeRefusedError: the ledger of the data cannot be used.
            JournalError: a ledger cannot be trusted.
        """
        try:
            with open_data_ledger(self.data) as ledger:
                for charge in charges:
                    self._spend(charge, ledger)
                self.run_journal.append_all(charges)
        except PolicyRefusalError as error:
            logger.warning("%s", error)
            raise
        except DeploymentError as error:
            raise ChargeRefusedError(str(error)) from error

    def _spend(self, charge: Charge, ledger: DataLedger) -> None:
        history = self.run_journal.history(charge.client)
        self._check_plan(charge, history)
        self._add_missing(history, ledger)
        new = DataCharge.of(charge, self.experiment)
        repeated = not self.plan.secure_noise and self._is_repeated(new, ledger)
        if not repeated:
            if not history:
                steps = self.plan.steps_to_take
                claimed, own = self.plan.charges(0, steps), self.plan.server_charges(0, steps)
                whole = counted_releases(claimed, own, given=self.policy.trust, needed=new.trust)
                self._check_budget(new, whole, ledger, f"all rounds of {self.experiment.name!r}")
            wanted = new.counted(self.policy.trust)
            self._check_budget(new, wanted, ledger, f"round {charge.round_number}")
        client_ledger(self.state, self.experiment, charge.client, claims_seed=True)
        if not repeated:
            ledger.append(new)

    def _check_plan(self, charge: Charge, history: Sequence[Charge]) -> None:
        last = history[-1].round_number if history else 0
        if charge.round_number < last:
            raise PolicyRefusalError(
                f"it is for round {charge.round_number}, and this client answered round {last} "
                "already: resume the run with its `out`"
            )
        taken = sum(charge.steps for charge in history)
        if taken + charge.steps > self.plan.planned_steps:
            raise PolicyRefusalError(
                f"round {charge.round_number} needs {charge.steps} steps, and "
                f"{self.experiment.name!r} plans {self.plan.planned_steps} for this client, of "
                f"which {taken} are taken"
            )

    def _add_missing(self, history: Iterable[Charge], ledger: DataLedger) -> None:
        """Add the experiment's earlier charges that the data ledger lacks.

        If the data file changed, rows may be in both versions, so both ledgers get the charges.
        """
        known = Counter((charge.place, charge.request) for charge in ledger.charges)
        for past in history:
            charge = DataCharge.of(past, self.experiment)
            key = charge.place, charge.request
            if known[key]:
                known[key] -= 1
            else:
                ledger.append(charge)

    @staticmethod
    def _is_repeated(new: DataCharge, ledger: DataLedger) -> bool:
        """Return whether this answer was charged before; raise for another one with its noise."""
        before = [charge.request for charge in ledger.charges if charge.place == new.place]
        if any(request != new.request for request in before):
            raise NoiseReuseError(
                f"client {new.client} was charged for another answer with seed {new.seed} in round "
                f"{new.round}, and would reuse its noise: start a new run with another seed"
            )
        return bool(before)

    def _check_budget(
        self, new: DataCharge, wanted: Releases, ledger: DataLedger, subject: str
    ) -> None:
        """Check that the policy's budget covers releases (`count_affordable`).

        One charge under replace_one puts all under it: its guarantee implies that for zero_out.
        """
        epsilon, delta = self.policy.max_epsilon, self.policy.delta
        if epsilon is None or delta is None:
            return
        limit = f"max_epsilon is {epsilon:g} at δ = {delta:g} for all experiments"
        spent: Counter[Event] = Counter()
        for charge in ledger.charges:
            for event, count in charge.counted(self.policy.trust):
                spent[event] += count
        adjacencies = {charge.adjacency for charge in (*ledger.charges, new)}
        adjacency = "replace_one" if "replace_one" in adjacencies else "zero_out"
        try:
            fit = count_affordable(spent, wanted, epsilon=epsilon, delta=delta, adjacency=adjacency)
        except UnsupportedEventError as error:
            raise PolicyRefusalError(
                f"{limit}, and {subject} has no rule for them: {error}"
            ) from error
        needed = sum(count for _, count in wanted)
        if fit < needed:
            raise PolicyRefusalError(
                f"{limit}, and {subject} would exceed it: of {needed} releases {fit} fit; plan "
                "fewer steps or more noise, or let the node's operator raise max_epsilon"
            )


def record_without_privacy(data: Path, experiment: Experiment, client: int) -> None:
    """Record that a node answered an experiment without privacy, which exceeds any budget."""
    charge = Charge(client, 0, "", 0, PrivacyLedger().record(NonPrivate()), GENESIS)
    release = DataCharge.of(charge, experiment)
    with open_data_ledger(data) as ledger:
        if release not in ledger.charges:
            ledger.append(release)


def _check_stored(path: Path, experiment: Experiment) -> bool:
    """Compare an experiment with the stored one; return whether an experiment is stored."""
    if not path.exists():
        return False
    refuse_open(path)
    before = _read(path)
    calibrated = before.privacy is not None and before.privacy.goal
    old, new = (settings.model_dump(mode="json") for settings in (before, experiment))
    # Noise may be calibrated to the number of rounds, which then may not change.
    may_change = ("runtime.",) if calibrated else ("runtime.", "federation.rounds")
    changed = [key for key in differences(old, new, "") if not key.startswith(may_change)]
    if changed:
        raise DeploymentError(
            f"{path.parent}: this client answered {before.name!r} with seed {before.seed}, and "
            f"{experiment.name!r} differs in {', '.join(changed)}: the same seed would draw "
            "the same noise again; choose another seed"
        )
    return True


def _read(path: Path) -> Experiment:
    """Return the stored experiment, if this version wrote it: another may draw other noise."""
    way_out = "continue with fedsim {version} on every node, or choose another seed"
    try:
        content = json.loads(path.read_bytes())
        check_version(path.parent, str(content["fedsim"]), way_out)
        check_schema(path, content)
        return Experiment.model_validate(content["experiment"])
    except SchemaError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        ledger, fix = path.with_name(_LEDGER), "no charge was recorded beside it: delete it"
        if ledger.exists() and ledger.stat().st_size:
            fix = "charges were recorded beside it: restore it from a copy, or choose another seed"
        raise DeploymentError(
            f"{path} is empty or damaged, as a crash can leave it; {fix}"
        ) from error


def record_release(state: Path, helper: int, release: HelperRelease) -> None:
    """Record a helper's release on its node's disk, unless it contradicts an earlier one.

    Guarantee: all recorded releases of a run in the same round are of the same sum, and a release
    is never of an earlier round than the one before it. This also holds across processes, crashes
    and restarts.

    Raises:
        AlreadyAnsweredError: another sum of the same round was already released.
        ReplayError: a sum of a later round was already released.
        SecureAggregationError: the record cannot be read or written; the sum may not be released
            then.
    """
    directory = state / f"helper-{helper}"
    path = directory / f"{hashlib.sha256(release.run_id.encode()).hexdigest()}.json"
    try:
        with exclusive(directory, state=state):
            if path.exists():
                refuse_open(path)
                _check_release(release, path)
            write_whole(path, json.dumps(asdict(release)))
    except (DeploymentError, OSError) as error:
        raise SecureAggregationError(
            f"helper {helper} cannot record the release, so it sends no sum: {error}",
            round_number=release.server_round,
        ) from error


def _check_release(release: HelperRelease, path: Path) -> None:
    try:
        last = _RELEASE.validate_json(path.read_bytes())
    except ValidationError as error:
        raise DeploymentError(
            f"{path} is damaged, so a second sum of a round could not be noticed: start a new run, "
            "and keep the file"
        ) from error
    if release.server_round < last.server_round:
        raise ReplayError(
            f"{path} records a released sum of round {last.server_round}, and earlier rounds are "
            "refused; continue with a later round",
            round_number=release.server_round,
        )
    if release.server_round == last.server_round and release.question != last.question:
        raise AlreadyAnsweredError(
            f"{path} records another released sum of this round; a second one would reveal single "
            "updates. Continue with a later round",
            round_number=release.server_round,
        )
