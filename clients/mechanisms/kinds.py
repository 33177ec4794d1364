"""The kinds of private release, and what is public of each.

This registry is the only place that lists kinds. All else asks a kind for its facts, or a release
for its methods (`fedsim.clients.mechanisms.contract`). It imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LossName = Literal["cross_entropy", "bce", "mse"]
LOSSES: tuple[LossName, ...] = ("cross_entropy", "bce", "mse")
"""Losses whose targets have a public bound, or can be given one."""

GRADIENT_PERTURBATION = "gradient_perturbation"
"""Default of `privacy.mechanism`: noise on clipped gradients, or on clipped updates of clients."""


def protects_client(unit: str) -> bool:
    """Whether one ε of a unit is for everything that a client has.

    Args:
        unit: as settings and records name it.
    """
    return unit == "client"


@dataclass(frozen=True, kw_only=True)
class ReleaseKind:
    """Public facts of a kind of private release.

    Attributes:
        name: of its module or folder under `clients/mechanisms`.
        drafts_in: module there whose `draft` plans it; "": the one of its name.
        unit: example or client: what one ε protects.
        mechanism: its name under `privacy.mechanism`; "" where a task asks for it.
        releases: what a client releases, for one line of text.
        bound: key of `privacy` that bounds what a unit contributes; "" where the kind's own
            settings have the bounds.
        draws_lots: whether each local step is a release, on a lot that is drawn from the examples;
            otherwise a round is one release.
        local_trust_only: whether the kind has a proof in local trust alone, so that it has no share
            of a noisy sum.
        server_learns_bound: whether adaptive clipping is the server's, by noisy counts of rounds.
        events: types of the events that its ledgers may have; empty where they follow from how lots
            or clients are drawn.
        sensitivity_of: what has the sensitivity of the adjacency, in words.
        sensitivity: bound of one unit's contribution, as a symbol.
        charged: what is charged each time, in words.
        reads: why clients' examples are read, in words.
        fixed: what was fixed before the run, in words.
        takes_canaries: whether an audit can plant canaries in what is released.
        later_rounds_are_free: whether rounds after the first one cost nothing.
        not_deployed: why a SuperNode refuses it; "" where it does not.
        title: heading of `statement`.
        statement: the release in words, in which {z}, {rounds}, {bound} and {max_feature_norm} are
            figures of a run; "" where the privacy statement has a sentence of its own for it.
    """

    name: str
    drafts_in: str = ""
    unit: str = "example"
    mechanism: str = GRADIENT_PERTURBATION
    releases: str
    bound: str = ""
    draws_lots: bool = False
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
        """Whether one ε is for everything that a client has, its number of examples included."""
        return protects_client(self.unit)


_DP_SGD = ReleaseKind(
    name="dp_sgd",
    drafts_in="dp_sgd.draft",
    releases="DP-SGD in every client",
    bound="max_grad_norm",
    draws_lots=True,
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
    "example moves the result by at most Δ, for the steps that run and not for their limit (Wu et "
    "al. 2017). Then it adds Gaussian noise of standard deviation z · Δ and releases the model, "
    "once a round. Here R = {max_feature_norm}, z = {z}, {rounds}.",
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
"""The kind of a federation without privacy: every question of it is answered with no."""

KINDS: Mapping[str, ReleaseKind] = {
    kind.name: kind for kind in (_DP_SGD, _CLIENT_UPDATE, _VOTES, _OUTPUT, _INPUT)
}


def kind_of(*, unit: str, mechanism: str = GRADIENT_PERTURBATION, votes: bool) -> ReleaseKind:
    """Return the kind of release that settings, or the records of a run, describe.

    A mechanism that the unit does not have gives the unit's own kind, and rules and statement
    refuse it.

    Args:
        unit: example or client.
        mechanism: name under `privacy.mechanism`.
        votes: whether clients vote on public queries.
    """
    if votes:
        return _VOTES
    of_settings = {(kind.unit, kind.mechanism): kind for kind in KINDS.values()}
    own = of_settings.get((unit, GRADIENT_PERTURBATION), _DP_SGD)
    return of_settings.get((unit, mechanism), own)
