"""What every client spent: the figures behind `privacy.json`, `clients.csv` and the report."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.journal import GENESIS, total_of
from fedsim.federation import Federation
from fedsim.report.figures import epsilon_text

SCHEMA = 1

NO_GUARANTEE = (
    "This federation ran without differential privacy: whoever sees a client's updates may learn "
    "anything about its examples."
)

_ADJACENCIES = {
    "zero_out": "zero-out adjacency: one example's contribution is replaced by nothing, and client "
    "sizes are public",
    "add_remove": "add/remove adjacency: one example is added or removed, and client sizes are "
    "private",
    "replace_one": "replace-one adjacency: one example becomes another, and client sizes are "
    "public",
}
_METHODS = {
    "pld": "privacy loss distribution, connect-the-dots, an upper bound",
    "rdp": "Rényi differential privacy, tight conversion, an upper bound",
}
_LOTS = {
    "poisson": "lots were drawn by Poisson sampling",
    "fixed_size": "lots of fixed size were drawn without replacement",
    "shuffle": "lots were cut from shuffled data, which is not counted as sampling",
    "balls_and_bins": "each epoch allocated every example to one lot at random",
}
_NOISE = {
    "seeded": "The noise comes from seeded streams, as a reproducible simulation needs: it "
    "protects nobody from someone who knows the seed.",
    "secure": "Lots and noise come from the operating system's randomness and cannot be repeated.",
}


@dataclass(frozen=True)
class ClientSpend:
    """One client's privacy spend; ε is ∞ where it added no noise."""

    client: int
    examples: int
    delta: float
    epsilon: float
    epsilon_rdp: float
    target_epsilon: float | None
    noise_multiplier: float
    sampling_rate: float
    max_grad_norm: float
    rounds: int
    steps: int
    head: str
    ledger: PrivacyLedger
    group: str | None = None
    withdrawn_round: int | None = None


@dataclass(frozen=True)
class PrivacySummary:
    """The privacy account of a federation; its guarantee is the largest ε of any client."""

    adjacency: str
    accountant: str
    clients: tuple[ClientSpend, ...]
    sampling: str = "poisson"
    noise: str = "seeded"

    @property
    def system_epsilon(self) -> float:
        """The federation's ε: the maximum over clients, never an average."""
        return max(spend.epsilon for spend in self.clients)

    @property
    def epsilon_statistics(self) -> dict[str, float | None]:
        """Largest, median and smallest ε of the clients; only the largest is a guarantee."""
        epsilons = [spend.epsilon for spend in self.clients]
        return {
            "max": finite_or_none(max(epsilons)),
            "median": finite_or_none(statistics.median(epsilons)),
            "min": finite_or_none(min(epsilons)),
        }

    @property
    def statement(self) -> str:
        """The guarantee in words: unit, adversary, adjacency, bound, and what is not claimed."""
        if not math.isfinite(self.system_epsilon):
            return (
                "At least one client added no noise to its updates: its ε is infinite, and so is "
                "the federation's. " + NO_GUARANTEE
            )
        deltas = sorted({spend.delta for spend in self.clients})
        return (
            "Against a server that sees every update, the updates of each client k are "
            "(ε_k, δ)-differentially private for its single training examples "
            f"({_ADJACENCIES[self.adjacency]}) over all rounds it took part in. "
            f"The largest ε_k is {epsilon_text(self.system_epsilon)} at δ = {deltas[-1]:g} "
            f"({_METHODS[self.accountant]}; {_LOTS[self.sampling]}). "
            "No amplification by client selection, shuffling or secure aggregation is claimed. "
            "Tuning runs on the same data are not charged. " + _NOISE[self.noise]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of `privacy.json`; an infinite ε is null."""
        return {
            "schema": SCHEMA,
            "private": math.isfinite(self.system_epsilon),
            "unit": "example",
            "adjacency": self.adjacency,
            "accountant": self.accountant,
            "noise": self.noise,
            "system_epsilon": finite_or_none(self.system_epsilon),
            "statement": self.statement,
            "clients": [_client_json(spend) for spend in self.clients],
        }


def not_private(sizes: Sequence[int]) -> dict[str, Any]:
    """Return the content of `privacy.json` for a federation without differential privacy."""
    return {
        "schema": SCHEMA,
        "private": False,
        "unit": "example",
        "adjacency": None,
        "accountant": None,
        "noise": None,
        "system_epsilon": None,
        "statement": NO_GUARANTEE,
        "clients": [
            {"client": client, "examples": size, "epsilon": None, "ledger": []}
            for client, size in enumerate(sizes)
        ],
    }


def summarise_privacy(
    federation: Federation, *, withdrawn: Mapping[int, int] | None = None
) -> PrivacySummary | None:
    """Return what every client spent according to the durable ledger; None without privacy.

    The ledger is read rather than the server's book: a charge whose update never arrived is spent
    all the same.

    Args:
        federation: with its ledger.
        withdrawn: the round in which each client that withdrew did so.

    Raises:
        JournalError: the ledger was changed.
        ValueError: a private federation without a ledger.
    """
    settings, plans, journal = federation.experiment.privacy, federation.plans, federation.journal
    terms = federation.terms
    if settings is None or plans is None or terms is None:
        return None
    if journal is None:
        raise ValueError("a private federation needs a ledger to summarise")
    spends = []
    for client, plan in enumerate(plans):
        history = journal.history(client)
        ledger = total_of(history)
        spends.append(
            ClientSpend(
                client=client,
                examples=plan.examples,
                delta=plan.delta,
                epsilon=ledger.epsilon(plan.delta, settings.accountant, settings.adjacency),
                epsilon_rdp=ledger.epsilon(plan.delta, "rdp", settings.adjacency),
                target_epsilon=plan.target_epsilon,
                noise_multiplier=plan.step.noise_multiplier,
                sampling_rate=plan.step.sampling.share,
                max_grad_norm=terms[client].privacy.max_grad_norm,
                rounds=len(history),
                steps=sum(charge.steps for charge in history),
                head=history[-1].hash if history else GENESIS,
                ledger=ledger,
                group=terms[client].group,
                withdrawn_round=(withdrawn or {}).get(client),
            )
        )
    return PrivacySummary(
        settings.adjacency,
        settings.accountant,
        tuple(spends),
        sampling=settings.sampling,
        noise=settings.noise,
    )


def finite_or_none(value: float) -> float | None:
    """Return the value for JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def _client_json(spend: ClientSpend) -> dict[str, Any]:
    return {
        "client": spend.client,
        "examples": spend.examples,
        "delta": spend.delta,
        "epsilon": finite_or_none(spend.epsilon),
        "epsilon_rdp": finite_or_none(spend.epsilon_rdp),
        "target_epsilon": spend.target_epsilon,
        "noise_multiplier": spend.noise_multiplier,
        "sampling_rate": spend.sampling_rate,
        "max_grad_norm": spend.max_grad_norm,
        "rounds": spend.rounds,
        "steps": spend.steps,
        "group": spend.group,
        "withdrawn_round": spend.withdrawn_round,
        "ledger": spend.ledger.to_list(),
        "ledger_head": spend.head,
    }
