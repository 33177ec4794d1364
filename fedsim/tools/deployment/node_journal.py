"""Journal of a node's client: checks the node's policy, then charges client and data ledgers.

A round is charged first to the ledger of the data (`data_ledger.py`), then to the client's ledger
of the experiment. A crash between the two leaves one charge too many, never one too few.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.accountant import Event, NonPrivate, PrivacyLedger, UnsupportedEventError
from fedsim.accountant.ledger.journal import Charge, Journal
from fedsim.accountant.trust import Trust
from fedsim.clients.account import ChargeRefusedError, NoiseReuseError
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.durable import GENESIS
from fedsim.experiment import Experiment
from fedsim.tools.deployment.data_budget import Releases, count_affordable, counted_releases
from fedsim.tools.deployment.data_ledger import DataCharge, DataLedger, open_data_ledger
from fedsim.tools.deployment.node_state import claim_seed
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
        state: the node's state directory.
        data: directory of the ledger of the data.
        policy: the node's policy.
        plan: the client's privacy plan.
        experiment: the experiment, which has privacy.
    """

    run_journal: Journal
    state: Path
    data: Path
    policy: NodePolicy
    plan: PrivacyPlan
    experiment: Experiment

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
                whole = self._planned_releases(new.trust)
                self._check_budget(new, whole, ledger, f"all rounds of {self.experiment.name!r}")
            wanted = new.counted(self.policy.trust)
            self._check_budget(new, wanted, ledger, f"round {charge.round_number}")
        claim_seed(self.state, self.experiment, charge.client)
        if not repeated:
            ledger.append(new)

    def _planned_releases(self, needed: Trust) -> Releases:
        """Return all releases of the plan that count against the node's budget."""
        steps = self.plan.steps_to_take
        claimed, own = self.plan.charges(0, steps), self.plan.server_charges(0, steps)
        return counted_releases(claimed, own, given=self.policy.trust, needed=needed)

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
        """Check that the budget of the policy covers releases (`data_budget.py`).

        If any charge is under the adjacency replace_one, all are composed under it: its guarantee
        implies the one for zero_out.
        """
        max_epsilon, delta = self.policy.max_epsilon, self.policy.delta
        if max_epsilon is None or delta is None:
            return
        limit = f"max_epsilon is {max_epsilon:g} at δ = {delta:g} for all experiments"
        counts: Counter[Event] = Counter()
        adjacencies = {new.adjacency}
        for charge in ledger.charges:
            adjacencies.add(charge.adjacency)
            for event, count in charge.counted(self.policy.trust):
                counts[event] += count
        adjacency = "replace_one" if "replace_one" in adjacencies else "zero_out"
        try:
            fit = count_affordable(
                counts, wanted, epsilon=max_epsilon, delta=delta, adjacency=adjacency
            )
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
    """Record that a node answered an experiment without privacy, which exceeds any budget.

    Args:
        data: directory of the ledger of the data.
        experiment: the experiment.
        client: number of the client.
    """
    charge = Charge(client, 0, "", 0, PrivacyLedger().record(NonPrivate()), GENESIS)
    release = DataCharge.of(charge, experiment)
    with open_data_ledger(data) as ledger:
        if release not in ledger.charges:
            ledger.append(release)
