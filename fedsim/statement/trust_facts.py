"""Recorded facts about trust model and unit, and what each of the six cells needs of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedsim.accountant.trust import OBSERVERS, Observer, adjacency_objection
from fedsim.clients.mechanisms.kinds import protects_client

UNITS = ("example", "client")
HIDING_PROTOCOLS = ("additive", "secagg", "secagg_plus")
UNMET_CONDITIONS: Mapping[str, str] = {
    "pinned_keys": "the keys of helpers and clients are not pinned, so parties can be made up",
    "opened_once": "no helper keeps an upload from two sums, or its noise can be repeated",
    "agreed_plan": "uploads are not bound to a plan of the noise that each client checks",
    "fixed_set": "the client set of a sum may depend on values of uploads",
}
"""Conditions of a guarantee against a server that departs from the protocol, and what fails."""

_LINEAR_CLIPPINGS = {"example": ("flat", "automatic"), "client": ("flat", "adaptive")}


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

    def event_types(self, of_lots: str | None) -> frozenset[str]:
        """Return the types that a client's events may have.

        Args:
            of_lots: type of the event of a lot; None where no sampling of lots is known.
        """
        if not self.protects_client:
            return frozenset() if of_lots is None else frozenset({of_lots})
        if self.participation_rate is not None:
            return frozenset({"PoissonSampled"})
        return frozenset({"Gaussian", "JointGaussian"})


LOCAL_EXAMPLE = TrustFacts()
"""Facts of a run that records neither trust model nor unit."""


def trust_objections(
    trust: TrustFacts,
    *,
    adjacency: str,
    sampling: str | None,
    clipping: str | None,
    secure_aggregation: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield every condition of the claimed view that the recorded facts do not meet.

    Args:
        trust: facts about trust model and unit.
        adjacency: of the claim.
        sampling: of lots; None for the client unit.
        clipping: of gradients or updates.
        secure_aggregation: what is recorded of the protocol; None without one.
    """
    if trust.trust not in OBSERVERS:
        yield f"its trust model {trust.trust!r} is not known"
    if trust.unit not in UNITS:
        yield f"its unit {trust.unit!r} is not known"
    if trust.protects_client and clipping not in _LINEAR_CLIPPINGS["client"]:
        yield f"clipping {clipping} bounds no whole update"
    if trust.trust == "distributed":
        yield from _objections_to_sums(trust, secure_aggregation)
    if trust.trust in ("distributed", "central"):
        yield from _objections_to_parts(trust, sampling, clipping)
    objection = adjacency_objection(
        adjacency, trust=trust.trust, protects_client=trust.protects_client
    )
    if objection is not None:
        yield objection
    if trust.participation_rate is not None:
        if (trust.trust, trust.unit) != ("central", "client"):
            yield "drawing clients lowers the ε of no other cell than central trust, client unit"
        if secure_aggregation is not None:
            yield "the parties of secure aggregation know which clients were drawn"


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
    if (secure or {}).get("protocol") not in HIDING_PROTOCOLS:
        yield "its updates were not summed by a protocol that hides them"
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


def _objections_to_parts(
    trust: TrustFacts, sampling: str | None, clipping: str | None
) -> Iterator[str]:
    """Yield what speaks against parts that depend on the client's data through one release only."""
    if clipping not in _LINEAR_CLIPPINGS.get(trust.unit, ()):
        yield f"clipping {clipping} has no theorem for sums"
    if trust.protects_client:
        return
    if trust.local_steps != 1:
        yield f"a client took {trust.local_steps} steps in a round, and sums need exactly one"
    if trust.optimizer != "sgd":
        yield f"optimizer {trust.optimizer} keeps a state of the client's own gradients"
    if sampling != "poisson":
        yield f"lots drawn by {sampling} have no theorem for sums"
