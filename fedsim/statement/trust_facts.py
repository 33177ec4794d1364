"""Recorded facts about trust model and unit, and what each of the six cells needs of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedsim.accountant.trust import OBSERVERS, Observer
from fedsim.clients.mechanisms.kinds import protects_client

UNITS = ("example", "client")
UNMET_CONDITIONS: Mapping[str, str] = {
    "pinned_keys": "the keys of helpers and clients are not pinned, so parties can be made up",
    "opened_once": "no helper keeps an upload from two sums, or its noise can be repeated",
    "agreed_plan": "uploads are not bound to a plan of the noise that each client checks",
    "fixed_set": "the client set of a sum may depend on values of uploads",
}
"""Conditions of a guarantee against a server that departs from the protocol, and what fails."""


@dataclass(frozen=True, kw_only=True)
class TrustFacts:
    """Trust model and unit of a run; None where a fact is not recorded or has no meaning.

    Attributes:
        trust: local, distributed or central.
        unit: example or client.
        min_clients: m, the fewest clients in a sum that is opened.
        colluding_clients: t, clients of a sum that may collude with its observer or add no noise.
        local_steps: noisy steps of a client in a round.
        optimizer: the client's optimizer; "sgd" is plain SGD.
        opened_sums: number of clients in each sum that was opened.
        unexplained: the first client whose claim needs more noise than the shares of its sums have.
        participation_rate: p where clients are drawn independently and in secret.
        weighting: the clients' weights, for the client unit.
        votes: `queries`, `answers`, `sigma_threshold` and `sigma` of PATE; None: clients train.
    """

    trust: str = "local"
    unit: str = "example"
    min_clients: int | None = None
    colluding_clients: int | None = None
    local_steps: int | None = None
    optimizer: str | None = None
    opened_sums: tuple[int, ...] = ()
    unexplained: int | None = None
    participation_rate: float | None = None
    weighting: str | None = None
    votes: Mapping[str, float] | None = None

    @property
    def protects_client(self) -> bool:
        """Whether the unit is everything that a client has."""
        return protects_client(self.unit)

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The observers that have a certificate, the claimed view first."""
        return OBSERVERS.get(self.trust, ())

    @property
    def honest_clients(self) -> int:
        """H = m - t, the fewest honest clients in a sum that is opened; 0 if not recorded."""
        if self.min_clients is None or self.colluding_clients is None:
            return 0
        return max(0, self.min_clients - self.colluding_clients)

    def event_types(self, of_batches: str | None) -> frozenset[str]:
        """Return the types that a client's events may have.

        Args:
            of_batches: type of the event of a batch; None where no sampling of batches is known.
        """
        if not self.protects_client:
            return frozenset() if of_batches is None else frozenset({of_batches})
        if self.participation_rate is not None:
            return frozenset({"PoissonSampled"})
        return frozenset({"Gaussian", "JointGaussian"})


LOCAL_EXAMPLE = TrustFacts()
"""Facts of a run that records neither trust model nor unit."""


def trust_objections(trust: TrustFacts, secure: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what a record says against its trust model and unit, beside `conditions.unmet`.

    Args:
        trust: facts about trust model and unit.
        secure: what is recorded of secure aggregation; None without it.
    """
    if trust.trust not in OBSERVERS:
        yield f"its trust model {trust.trust!r} is not known"
    if trust.unit not in UNITS:
        yield f"its unit {trust.unit!r} is not known"
    if trust.trust == "distributed":
        yield from _objections_to_sums(trust, secure)


def unmet_conditions(secure: Mapping[str, Any] | None) -> list[str]:
    """Return the names of `UNMET_CONDITIONS` that a run does not meet, by its own record.

    Args:
        secure: what is recorded of the protocol; None without one.
    """
    trust = (secure or {}).get("trust")
    met = trust.get("conditions", {}) if isinstance(trust, Mapping) else {}
    return [name for name in UNMET_CONDITIONS if met.get(name) is not True]


def _objections_to_sums(trust: TrustFacts, secure: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what speaks against hiding each client's part behind the noise of the others."""
    unmet = unmet_conditions(secure)
    if unmet and (secure or {}).get("simulated_non_collusion") is False:
        yield (
            "its parties were real, and nothing kept its server to the protocol: "
            f"{'; '.join(UNMET_CONDITIONS[name] for name in unmet)}"
        )
    if (secure or {}).get("clipped", 0) != 0:
        yield "values were clipped after their noise was added"
    if trust.honest_clients < 1:
        yield "min_clients and colluding_clients leave no honest client in a sum"
    elif any(number < (trust.min_clients or 0) for number in trust.opened_sums):
        yield f"a sum of fewer than {trust.min_clients} clients was opened"
    elif trust.unexplained is not None:
        yield (
            f"the ledger of client {trust.unexplained} claims more noise than the shares of "
            f"{trust.honest_clients} honest clients have"
        )
