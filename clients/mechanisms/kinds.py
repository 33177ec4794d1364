"""Registry of privacy mechanisms, with the public properties of each.

No other module lists the mechanisms. Other modules read the attributes of a `ReleaseKind`, or call
the methods of a `Mechanism` (`fedsim.clients.mechanisms.contract`). This module does not import
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LossName = Literal["cross_entropy", "bce", "mse"]
LOSSES: tuple[LossName, ...] = ("cross_entropy", "bce", "mse")
"""Losses whose targets are bounded, or can be clipped to a public bound."""

GRADIENT_PERTURBATION = "gradient_perturbation"
"""Default of `privacy.mechanism`: noise on clipped gradients, or on clipped updates of clients."""


def protects_client(unit: str) -> bool:
    """Whether a privacy unit is the whole client, so that ε protects all of its data together.

    Args:
        unit: the privacy unit, "example" or "client".
    """
    return unit == "client"


@dataclass(frozen=True, kw_only=True)
class ReleaseKind:
    """Public properties of a privacy mechanism.

    Attributes:
        name: name of the mechanism's module or folder under `clients/mechanisms`.
        drafts_in: module under `clients/mechanisms` whose function `draft` plans the mechanism; ""
            stands for the module called `name`.
        unit: privacy unit, "example" or "client".
        mechanism: value of `privacy.mechanism` that selects the mechanism; "" if a task selects it.
        releases: short text that says what a client releases, such as "votes of clients".
        bound: key of `privacy` that bounds the contribution of a unit; "" if the settings of the
            mechanism have the bounds.
        draws_batches: whether each local step is a release on a batch drawn from the examples;
            otherwise a round is one release.
        local_trust_only: whether the privacy proof holds in local trust only. Releases can then not
            be summed over clients with a share of the noise in each.
        server_learns_bound: whether the server can adapt the clipping norm after each round, from
            noisy counts.
        events: class names of the privacy events that a ledger may contain; empty if the way in
            which batches or clients are drawn determines them.
        sensitivity_of: text that follows "The L2 sensitivity of" in the privacy statement.
        sensitivity: symbol for the bound on the contribution of one unit, such as "C".
        charged: text that says what the ledger charges for, such as "every training step".
        reads: text that says what clients read their examples for, such as "training".
        fixed: text that says what is fixed before a run, such as "Noise and the number of rounds".
        takes_canaries: whether a privacy audit can insert canaries into the release.
        later_rounds_are_free: whether rounds after the first one cost no privacy.
        not_deployed: reason why a node of a real deployment (SuperNode) refuses the mechanism; ""
            if a node accepts the mechanism.
        title: heading of `statement`.
        statement: the mechanism in words, a template with the fields {z}, {rounds}, {bound} and
            {max_feature_norm}; "" if the privacy statement describes the mechanism elsewhere.
    """

    name: str
    drafts_in: str = ""
    unit: str = "example"
    mechanism: str = GRADIENT_PERTURBATION
    releases: str
    bound: str = ""
    draws_batches: bool = False
    local_trust_only: bool = False
    server_learns_bound: bool = False
    events: frozenset[str] = frozenset()
    sensitivity_of: str
    sensitivity: str = "C"
    charged: str
    reads: str = "training"
    fixed: str = "Noise and the number of rounds"
    takes_canaries: bool = False
    later_rounds_are_free: bool = False
    not_deployed: str = ""
    title: str = ""
    statement: str = ""

    @property
    def protects_client(self) -> bool:
        """Whether ε protects all data of a client together, even its number of examples."""
        return protects_client(self.unit)


_DP_SGD = ReleaseKind(
    name="dp_sgd",
    drafts_in="dp_sgd.draft",
    releases="DP-SGD in every client",
    bound="max_grad_norm",
    draws_batches=True,
    takes_canaries=True,
    sensitivity_of="a sum of clipped gradients",
    charged="every training step",
    fixed="Noise, sampling rates and step counts",
)
_CLIENT_UPDATE = ReleaseKind(
    name="client_update",
    unit="client",
    releases="whole updates of clients",
    bound="max_update_norm",
    server_learns_bound=True,
    takes_canaries=True,
    sensitivity_of="a sum of clipped updates",
    sensitivity="S",
    charged="every release of an update",
)
_VOTES = ReleaseKind(
    name="votes",
    drafts_in="votes.mechanism",
    unit="client",
    mechanism="",
    releases="votes of clients",
    sensitivity_of="the votes on a query",
    sensitivity="√2 votes",
    charged="every ballot",
    fixed="Noise and the charged number of queries",
    not_deployed="task: pate is for simulations: a node's policy has no limits for votes yet; use "
    "task: federated",
)
_OUTPUT = ReleaseKind(
    name="output_perturbation",
    mechanism="output_perturbation",
    releases="noise on trained models",
    local_trust_only=True,
    events=frozenset({"Gaussian"}),
    sensitivity_of="a trained model",
    sensitivity="Δ",
    charged="every release of a trained model",
    title="Noise on the trained model",
    statement="A client scales features down to L2 norm R and takes a fixed number of gradient "
    "steps without noise on a linear model, whose loss is strongly convex by its weight decay. One "
    "example moves the result of these steps by at most Δ (Wu et al. 2017). Then the client adds "
    "Gaussian noise of standard deviation z · Δ and releases the model, once a round. Here R = "
    "{max_feature_norm}, z = {z}, {rounds}.",
)
_INPUT = ReleaseKind(
    name="input_perturbation",
    mechanism="input_perturbation",
    releases="noise on examples, once",
    local_trust_only=True,
    events=frozenset({"JointGaussian"}),
    sensitivity_of="an example, features and target over √2 times their bounds,",
    sensitivity="1",
    charged="the release of these",
    reads="their noisy copies",
    later_rounds_are_free=True,
    title="Noise on the examples",
    statement="Before its first round a client scales features down to L2 norm R, writes targets "
    "within their bound (a class as a row with one 1), and adds Gaussian noise to both, with a "
    "noise multiplier of z together. This is one release, charged once. All steps of all rounds "
    "read these noisy examples alone, and cost nothing. Here R = {max_feature_norm}, z = {z}.",
    not_deployed="noisy examples are charged once, and a node's examples may change between "
    "rounds; set privacy.mechanism to gradient_perturbation",
)
NO_RELEASE = ReleaseKind(
    name="none",
    unit="",
    mechanism="",
    releases="nothing",
    sensitivity_of="",
    charged="",
)
"""The kind of a federation without privacy: all its flags are False."""

KINDS: Mapping[str, ReleaseKind] = {
    kind.name: kind for kind in (_DP_SGD, _CLIENT_UPDATE, _VOTES, _OUTPUT, _INPUT)
}


def kind_of(*, unit: str, mechanism: str = GRADIENT_PERTURBATION, votes: bool) -> ReleaseKind:
    """Return the properties of the mechanism for a privacy unit and the name of a mechanism.

    If the unit has no such mechanism, the result is the unit's gradient perturbation. The rules for
    settings and the privacy statement then refuse the combination.

    Args:
        unit: privacy unit, "example" or "client".
        mechanism: value of `privacy.mechanism`.
        votes: whether clients vote on public queries.
    """
    if votes:
        return _VOTES
    of_settings = {(kind.unit, kind.mechanism): kind for kind in KINDS.values()}
    default = of_settings.get((unit, GRADIENT_PERTURBATION), _DP_SGD)
    return of_settings.get((unit, mechanism), default)
