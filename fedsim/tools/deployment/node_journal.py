"""Journal of a node's client: checks the node's policy, then charges client and data ledgers.

A round is charged first to the ledger of the data (`data_ledger.py`), then to the client's ledger
of the experiment. A crash between the two leaves one charge too many, never one too few.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.accountant import Event, NonPrivate, PrivacyLedger, UnsupportedEventError
from fedsim.accountant.events import Adjacency
from fedsim.accountant.ledger.journal import Charge, Journal
from fedsim.clients.account import ChargeRefusedError, NoiseReuseError
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.tools.deployment.data_budget import Releases, Trust, count_affordable, counted_releases
from fedsim.tools.deployment.data_ledger import DataCharge, DataLedger, open_data_ledger
from fedsim.tools.deployment.policy import NodePolicy
from fedsim.tools.deployment.policy_rules import PolicyRefusalError
from fedsim.tools.deployment.private_files import DeploymentError

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class NodeJournal:
    """A client's durable ledger on a node, which also charges the ledger of the client's data set.

    The ledger of a data set has the charges of all experiments. A charge is refused if it would
    exceed the budget that the node's policy sets for the data set.

    Guarantee: all charges of one data set together stay within `max_epsilon` at `delta` of the
    policy, against everybody whom the policy does not trust. This also holds for a server that
    chooses each experiment after it saw the earlier answers. A refused charge is in no ledger.

    Attributes:
        run_journal: the client's ledger of the experiment.
        data: directory of the ledger of the data.
        policy: the node's policy.
        plan: the client's privacy plan.
        experiment: name of the experiment.
        seed: seed of the experiment.
        adjacency: adjacency of the experiment.
        trust: `privacy.trust` of the experiment.
        claim: function that reserves the seed for the experiment, called before the first charge.
    """

    run_journal: Journal
    data: Path
    policy: NodePolicy
    plan: PrivacyPlan
    experiment: str
    seed: int
    adjacency: Adjacency
    claim: Callable[[], None]
    trust: Trust = "local"

    def history(self, client: int, *, after: int = 0) -> tuple[Charge, ...]:
        """Return the charges of a client, oldest first, without the first `after` charges."""
        return self.run_journal.history(client, after=after)

    def append(self, charge: Charge) -> None:
        """Append a charge to both ledgers, if the policy allows it.

        Raises:
            PolicyRefusalError: the policy forbids the charge.
            NoiseReuseError: the noise of the round was already used for another answer.
            ChargeRefusedError: the ledger of the data cannot be used.
            JournalError: a ledger cannot be trusted.
        """
        self.append_all([charge])

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
        new = self._data_charge(charge)
        repeated = not self.plan.secure_noise and self._is_repeated(new, ledger)
        if not history and not repeated:
            whole = self._planned_releases()
            self._check_budget(whole, ledger, f"all rounds of {self.experiment!r}")
        if not repeated:
            wanted = new.counted(self.policy.trust)
            self._check_budget(wanted, ledger, f"round {charge.round_number}")
        self.claim()
        if not repeated:
            ledger.append(new)

    def _planned_releases(self) -> Releases:
        """Return all releases of the plan that count against the node's budget."""
        steps = self.plan.steps_to_take
        return counted_releases(
            self.plan.charges(0, steps),
            self.plan.server_charges(0, steps),
            given=self.policy.trust,
            needed=self.trust,
        )

    def _check_plan(self, charge: Charge, history: Sequence[Charge]) -> None:
        """Check that a charge continues the client's history and stays within the plan."""
        last = history[-1].round_number if history else 0
        if charge.round_number < last:
            raise PolicyRefusalError(
                f"it is for round {charge.round_number}, and this client answered round {last} "
                "already: resume the run with its `out`"
            )
        taken = sum(charge.steps for charge in history)
        if taken + charge.steps > self.plan.planned_steps:
            raise PolicyRefusalError(
                f"round {charge.round_number} needs {charge.steps} steps, and {self.experiment!r} "
                f"plans {self.plan.planned_steps} for this client, of which {taken} are taken"
            )

    def _add_missing(self, history: Iterable[Charge], ledger: DataLedger) -> None:
        """Add the experiment's earlier charges that the data ledger lacks.

        If the data file changed, rows may be in both versions, so both ledgers get the charges.
        """
        known = Counter((charge.place, charge.request) for charge in ledger.charges)
        for charge in map(self._data_charge, history):
            key = charge.place, charge.request
            if known[key]:
                known[key] -= 1
            else:
                ledger.append(charge)

    def _data_charge(self, charge: Charge) -> DataCharge:
        return DataCharge(
            experiment=self.experiment,
            seed=self.seed,
            client=charge.client,
            round_number=charge.round_number,
            request=charge.request,
            adjacency=self.adjacency,
            ledger=charge.ledger,
            trust=self.trust,
            against_server=charge.against_server,
        )

    @staticmethod
    def _is_repeated(new: DataCharge, ledger: DataLedger) -> bool:
        """Return whether this answer was charged before; raise for another one with its noise."""
        before = [charge.request for charge in ledger.charges if charge.place == new.place]
        if any(request != new.request for request in before):
            raise NoiseReuseError(
                f"client {new.client} was charged for another answer with seed {new.seed} in round "
                f"{new.round_number}, and would reuse its noise: start a new run with another seed"
            )
        return bool(before)

    def _check_budget(self, wanted: Releases, ledger: DataLedger, subject: str) -> None:
        check_budget(self.policy, ledger.charges, wanted, adjacency=self.adjacency, subject=subject)


def check_budget(
    policy: NodePolicy,
    spent: Iterable[DataCharge],
    wanted: Releases,
    *,
    adjacency: Adjacency,
    subject: str,
) -> None:
    """Check that the budget of a policy covers the wanted releases (`data_budget.py`).

    If all charges are under the adjacency zero_out, they are composed under zero_out. If any charge
    is under replace_one, all are composed under replace_one, whose guarantee implies the one for
    zero_out.

    Args:
        policy: the node's policy.
        spent: all earlier charges to the data.
        wanted: pairs (event, number of releases).
        adjacency: adjacency of the wanted releases.
        subject: name of the wanted releases for the error message.

    Raises:
        PolicyRefusalError: the releases exceed the budget, or have no privacy bound under the
            common adjacency.
    """
    if policy.max_epsilon is None or policy.delta is None:
        return
    limit = f"max_epsilon is {policy.max_epsilon:g} at δ = {policy.delta:g} for all experiments"
    counts: Counter[Event] = Counter()
    adjacencies = {adjacency}
    for charge in spent:
        adjacencies.add(charge.adjacency)
        for event, count in charge.counted(policy.trust):
            counts[event] += count
    try:
        fit = count_affordable(
            counts,
            wanted,
            epsilon=policy.max_epsilon,
            delta=policy.delta,
            adjacency="replace_one" if "replace_one" in adjacencies else "zero_out",
        )
    except UnsupportedEventError as error:
        raise PolicyRefusalError(f"{limit}, and {subject} has no rule for them: {error}") from error
    needed = sum(count for _, count in wanted)
    if fit < needed:
        raise PolicyRefusalError(
            f"{limit}, and {subject} would exceed it: of {needed} releases {fit} fit; plan fewer "
            "steps or more noise, or let the node's operator raise max_epsilon"
        )


def record_without_privacy(data: Path, *, experiment: str, seed: int, client: int) -> None:
    """Record that a node answered an experiment without privacy, which exceeds any budget.

    Args:
        data: directory of the ledger of the data.
        experiment: name of the experiment.
        seed: seed of the experiment.
        client: number of the client.
    """
    release = DataCharge(
        experiment=experiment,
        seed=seed,
        client=client,
        round_number=0,
        request="",
        adjacency="zero_out",
        ledger=PrivacyLedger().record(NonPrivate()),
    )
    with open_data_ledger(data) as ledger:
        if release not in ledger.charges:
            ledger.append(release)
