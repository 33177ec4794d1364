"""Conditions on the settings of a run under which the theorems behind its ε hold.

Before a run, an experiment file that fails a condition is refused. After a run, the privacy
statement claims no guarantee if the run's record fails a condition. This module imports neither
torch nor numpy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedsim.clients.mechanisms.kinds import (
    GRADIENT_PERTURBATION,
    KINDS,
    NO_RELEASE,
    ReleaseKind,
    kind_of,
    protects_client,
)
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.noise.correlated.settings import OF_ROUNDS, OF_STEPS

HIDING_PROTOCOLS = ("additive", "secagg", "secagg_plus")
"""Protocols of secure aggregation that reveal only sums of updates."""

LINEAR_CLIPPINGS: Mapping[str, tuple[str, ...]] = {
    "example": ("flat", "automatic"),
    "client": ("flat", "adaptive"),
}
"""For each privacy unit, the clippings that bound its whole contribution with one norm."""

ADJACENCIES = ("zero_out", "add_remove", "replace_one")


def most_examples(declared: int) -> int:
    """Return the public limit on a client's private number of examples under add_remove.

    The rounding of a client's sums grows with the number of its examples, and is charged for as
    many as this. A client that has more is refused (`ClientTask.check_examples`).

    Args:
        declared: the declared number of examples.
    """
    return max(16 * declared, 1 << 20)


CORRELATED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "example": {
        "correlation": OF_STEPS,
        "trust": ("local",),
        "sampling": tuple(scheme.name for scheme in SAMPLING_SCHEMES.values() if scheme.is_cyclic),
        "noise": ("seeded",),
        "adjacency": ("zero_out",),
        "clipping": ("flat", "per_layer", "automatic"),
    },
    "client": {
        "correlation": tuple(OF_ROUNDS),
        "trust": ("central",),
        "noise": ("seeded",),
        "adjacency": ("zero_out", "replace_one"),
        "clipping": ("flat",),
    },
}
"""For each privacy unit, the values of a choice under which correlated noise has a guarantee."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of a run that its privacy theorems depend on, from its settings or its record.

    Attributes:
        trust: trust model, "local", "distributed" or "central".
        unit: privacy unit, "example" or "client".
        votes: whether clients vote on public queries.
        mechanism: value of `privacy.mechanism`.
        adjacency: adjacency of the privacy claim.
        sampling: name of the sampling of batches, or None if no batches are drawn, or if the run's
            record does not have it.
        clipping: name of the clipping of gradients or updates.
        noise: "seeded" (drawn from the seed) or "secure" (drawn from the operating system).
        correlation: name of the correlation of noise from step to step; "none" if independent.
        local_steps: number of noisy steps of a client in a round, or None if there are several, or
            if the record does not have it.
        optimizer: name of the client's optimizer; "sgd" means no momentum and no weight decay.
        draws_clients: whether each client is drawn into a round independently, and who was drawn is
            kept secret, so that sampling of clients amplifies privacy.
        protocol: name of the protocol of secure aggregation, or None without one.
    """

    trust: str = "local"
    unit: str = "example"
    votes: bool = False
    mechanism: str = GRADIENT_PERTURBATION
    adjacency: str = "zero_out"
    sampling: str | None = "poisson"
    clipping: str | None = "flat"
    noise: str | None = "seeded"
    correlation: str = "none"
    local_steps: int | None = 1
    optimizer: str | None = "sgd"
    draws_clients: bool = False
    protocol: str | None = None

    @property
    def kind(self) -> ReleaseKind:
        """Properties of the chosen mechanism; `NO_RELEASE` if `mechanism` is unknown."""
        if self.mechanism not in (GRADIENT_PERTURBATION, *KINDS):
            return NO_RELEASE
        return kind_of(unit=self.unit, mechanism=self.mechanism, votes=self.votes)

    @property
    def sums_steps(self) -> bool:
        """Whether gradient steps are summed over clients, and noise protects the sum."""
        return self.trust in ("distributed", "central") and not protects_client(self.unit)


def unmet(choices: Choices) -> dict[str, str]:
    """Return a dict with the conditions that the choices fail, from name to reason in words."""
    return {
        name: condition.objection(choices)
        for name, condition in CONDITIONS.items()
        if condition.fails(choices)
    }


@dataclass(frozen=True)
class Condition:
    """Condition of a privacy theorem on the choices of a run.

    Attributes:
        fails: function that returns whether given choices fail the condition.
        objection: function that returns, in words, why choices that fail it have no guarantee.
    """

    fails: Callable[[Choices], bool]
    objection: Callable[[Choices], str]


def _batches_have_no_event(choices: Choices) -> bool:
    scheme = SAMPLING_SCHEMES.get(choices.sampling or "")
    if scheme is None or not choices.kind.draws_batches:
        return False
    return choices.adjacency in ADJACENCIES and choices.adjacency not in scheme.adjacencies


def _no_event(choices: Choices) -> str:
    scheme = SAMPLING_SCHEMES[choices.sampling or ""]
    return (
        f"batches drawn by {scheme.name} have no guarantee under {choices.adjacency} adjacency, "
        f"because {scheme.obstacle}"
    )


def _adjacency(choices: Choices) -> str | None:
    """Return why neighbours differ in more than the charged releases, or None if they do not.

    Under add_remove nothing public may depend on whether the unit is there. With whole clients, the
    number of clients sets the sampling rate, the largest noise of a client is that of a sum, and
    records name every client; `zero_out` has the same events, and makes the list of clients public.
    The noise of a sum over examples depends on the sizes of all clients.
    """
    if choices.adjacency != "add_remove":
        return None
    if choices.kind.protects_client:
        return (
            "under add_remove a client would be there or not, and the rate of draws, the noise of "
            "a sum and the records follow from the list of clients"
        )
    if choices.trust != "local":
        return (
            f"trust: {choices.trust} needs public client sizes, which set every client's noise, "
            "and add_remove keeps them private"
        )
    return None


def _is_uncorrelated(choices: Choices, name: str) -> bool:
    """Whether noise is correlated, and a choice has a value for which nothing is proven."""
    if choices.correlation == "none":
        return False
    value = getattr(choices, name)
    return value not in CORRELATED.get(choices.unit, {}).get(name, (value,))


def _off_gradients(choices: Choices) -> bool:
    return choices.mechanism != GRADIENT_PERTURBATION


CONDITIONS: Mapping[str, Condition] = {
    "update_clipping": Condition(
        lambda c: protects_client(c.unit) and c.clipping not in LINEAR_CLIPPINGS["client"],
        lambda c: f"clipping {c.clipping} bounds no whole update",
    ),
    "hidden_updates": Condition(
        lambda c: c.trust == "distributed" and c.protocol not in HIDING_PROTOCOLS,
        lambda c: "its updates were not summed by a protocol that hides them",
    ),
    "sum_clipping": Condition(
        lambda c: (
            c.trust in ("distributed", "central")
            and c.clipping not in LINEAR_CLIPPINGS.get(c.unit, ())
        ),
        lambda c: f"clipping {c.clipping} has no theorem for sums",
    ),
    "one_step": Condition(
        lambda c: c.sums_steps and c.local_steps != 1,
        lambda c: f"a client took {c.local_steps} steps in a round, and sums need exactly one",
    ),
    "plain_sgd": Condition(
        lambda c: c.sums_steps and c.optimizer != "sgd",
        lambda c: f"optimizer {c.optimizer} keeps a state of the client's own gradients",
    ),
    "poisson_batches": Condition(
        lambda c: c.sums_steps and c.sampling != "poisson",
        lambda c: f"batches drawn by {c.sampling} have no theorem for sums",
    ),
    "adjacency": Condition(
        lambda c: _adjacency(c) is not None,
        lambda c: _adjacency(c) or "",
    ),
    "batches_of_adjacency": Condition(_batches_have_no_event, _no_event),
    "drawn_clients": Condition(
        lambda c: c.draws_clients and (c.trust, c.unit) != ("central", "client"),
        lambda c: "drawing clients lowers ε only with trust: central and unit: client",
    ),
    "secret_draws": Condition(
        lambda c: c.draws_clients and c.protocol is not None,
        lambda c: "the parties of secure aggregation know which clients were drawn",
    ),
    "mechanism": Condition(
        lambda c: _off_gradients(c) and not c.kind.local_trust_only,
        lambda c: f"its mechanism {c.mechanism!r} is not known",
    ),
    "cell_of_mechanism": Condition(
        lambda c: (
            _off_gradients(c)
            and (c.trust != "local" or (c.kind.protects_client and not c.kind.local_trust_only))
        ),
        lambda c: "this privacy.mechanism has a guarantee only with trust: local and unit: example",
    ),
    "adjacency_of_mechanism": Condition(
        lambda c: _off_gradients(c) and c.adjacency == "add_remove",
        lambda c: "this privacy.mechanism has no guarantee under add_remove adjacency",
    ),
    "noise_of_mechanism": Condition(
        lambda c: _off_gradients(c) and c.kind.later_rounds_are_free and c.noise == "secure",
        lambda c: (
            "secure noise cannot be drawn again, and a process that restarts must make the same "
            "noisy examples again"
        ),
    ),
    "correlation": Condition(
        lambda c: _is_uncorrelated(c, "correlation"),
        lambda c: f"noise correlated by {c.correlation} has no guarantee for unit: {c.unit}",
    ),
    "batches_of_correlation": Condition(
        lambda c: c.sampling in SAMPLING_SCHEMES and _is_uncorrelated(c, "sampling"),
        lambda c: f"its noise is correlated, and batches drawn by {c.sampling} may be close",
    ),
    "cell_of_correlation": Condition(
        lambda c: _is_uncorrelated(c, "trust"),
        lambda c: (
            "correlated noise has a guarantee only with trust: local and unit: example, or with "
            "trust: central and unit: client"
        ),
    ),
    "draws_of_correlation": Condition(
        lambda c: _is_uncorrelated(c, "adjacency") or _is_uncorrelated(c, "noise"),
        lambda c: (
            f"correlated noise has no guarantee under {c.adjacency} adjacency with {c.noise} noise"
        ),
    ),
    "clients_of_correlation": Condition(
        lambda c: c.correlation != "none" and c.draws_clients,
        lambda c: "its noise is correlated, and clients that are drawn may be in close rounds",
    ),
    "clipping_of_correlation": Condition(
        lambda c: _is_uncorrelated(c, "clipping"),
        lambda c: f"correlated noise is charged for one fixed bound, and clipping is {c.clipping}",
    ),
}
"""Every condition by name."""
