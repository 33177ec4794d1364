"""Recorded facts about a run's trust model and privacy unit, and checks that they support its ε."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fedsim.accountant.trust import OBSERVERS, Observer, Unit

# Each condition of a guarantee against an active server, with what fails without it.
UNMET_CONDITIONS: Mapping[str, str] = {
    "pinned_keys": "the keys of helpers and clients are not fixed in advance, so parties can be "
    "invented",
    "opened_once": "no helper keeps an upload from entering two sums, or its noise can be repeated",
    "agreed_plan": "uploads are not bound to a plan of the noise that each client checks",
    "fixed_set": "the client set of a sum may depend on values of uploads",
}


@dataclass(frozen=True, kw_only=True)
class TrustFacts:
    """Recorded facts about a run's trust model and privacy unit.

    A fact is None if it is unknown or does not apply to the run. A client counts as colluding if it
    adds no noise to a sum, too. `votes` has PATE's `queries`, `answers`, `sigma_threshold` and
    `sigma`; it is None if clients train.
    """

    trust: str = "local"
    unit: str = "example"
    min_clients: int | None = None  # in a secure sum that is opened
    colluding_clients: int | None = None  # with the observer of a sum, at most
    local_steps: int | None = None  # noisy steps of a client in a round
    optimizer: str | None = None
    unexplained: int | None = None  # first client whose ledger claims more noise than is added
    participation_rate: float | None = None  # of each client, independently and in secret
    weighting: str | None = None  # of clients, if the privacy unit is the client
    votes: Mapping[str, float] | None = None

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The adversaries with a guarantee; the run's ε holds against the first one."""
        return OBSERVERS.get(self.trust, ())

    @property
    def honest_clients(self) -> int:
        """Smallest number of honest clients in an opened sum; 0 if it is not recorded."""
        if self.min_clients is None or self.colluding_clients is None:
            return 0
        return max(0, self.min_clients - self.colluding_clients)


def trust_objections(trust: TrustFacts, secure: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield reasons why the recorded facts on trust do not support the ε that a run claims."""
    if trust.trust not in OBSERVERS:
        yield f"its trust model {trust.trust!r} is not known"
    if trust.unit not in get_args(Unit):
        yield f"its unit {trust.unit!r} is not known"
    if trust.trust != "distributed":
        return
    # Each client's part of a sum must be hidden behind the noise of the other clients.
    secure = secure or {}
    unmet, opened = unmet_conditions(secure), secure.get("parties") or {}
    if unmet and secure.get("simulated_non_collusion") is False:
        yield (
            "its parties were real, and nothing kept its server to the protocol: "
            f"{'; '.join(UNMET_CONDITIONS[name] for name in unmet)}"
        )
    if secure.get("clipped", 0) != 0:
        yield "values were clipped after their noise was added"
    if trust.honest_clients < 1:
        yield "min_clients and colluding_clients leave no honest client in a sum"
    elif any(n < (trust.min_clients or 0) for n in opened.get("survivors_per_round", ())):
        yield f"a sum of fewer than {trust.min_clients} clients was opened"
    elif trust.unexplained is not None:
        yield (
            f"the ledger of client {trust.unexplained} claims more noise than the shares of "
            f"{trust.honest_clients} honest clients have"
        )


def unmet_conditions(secure: Mapping[str, Any] | None) -> list[str]:
    """Return the names in `UNMET_CONDITIONS` of conditions that are not recorded as met."""
    met = ((secure or {}).get("trust") or {}).get("conditions", {})
    return [name for name in UNMET_CONDITIONS if met.get(name) is not True]
