"""Arms: the usual baselines of a federation, as changes to the base experiment of a comparison.

`arm: pooled` in a variant stands for a list of overrides. The variant is then an ordinary
experiment, which `fedsim run` can run from its `experiment.yaml`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedsim.algorithms.catalog import algorithms
from fedsim.core.settings import written_name

ARM = "arm"

Changes = dict[str, object]
"""Overrides of an experiment, as `{"key.path": value}`."""

_DRAWN_SCHEMES = ("iid", "dirichlet", "shards", "quantity")


class ArmError(ValueError):
    """The base experiment has no such arm; the message names the fix."""


@dataclass(frozen=True)
class Arm:
    """A baseline.

    Attributes:
        description: its line in the reference.
        note: whom it protects from whom, and whom it trusts, for the page of a comparison.
        changes: returns its changes to a base experiment, given as a mapping.
    """

    description: str
    note: str
    changes: Callable[[Mapping[str, Any]], Changes]


def _plain(base: Mapping[str, Any]) -> Changes:
    return {"privacy": None, **_without_noise_weights(base)}


def _local_only(base: Mapping[str, Any]) -> Changes:
    changes: Changes = {"federation.strategy": "local_only", "federation.weighting": "uniform"}
    return {**changes, **_alone(base), **_absent(base, "federation", "server_averaging")}


def _pooled(base: Mapping[str, Any]) -> Changes:
    partition, privacy = _section(_section(base, "data"), "partition"), _section(base, "privacy")
    local, federation = _section(base, "local"), _section(base, "federation")
    scheme, clients = partition.get("scheme"), partition.get("num_clients")
    if scheme not in _DRAWN_SCHEMES or not isinstance(clients, int):
        raise ArmError(
            f"pooled gives one client the examples of all, and scheme {scheme} may leave some out; "
            f"use it with {', '.join(_DRAWN_SCHEMES)} and num_clients"
        )
    if privacy.get("unit") == "client":
        raise ArmError(
            "pooled has one client, so unit: client would protect everything from everybody; set "
            "privacy.unit: example with max_grad_norm in the base"
        )
    if privacy.get("clients"):
        raise ArmError(
            "pooled has one client, and privacy.clients of the base gives clients budgets of their "
            "own; remove privacy.clients from the base"
        )
    drawn = federation.get("clients_per_round")
    drawn = drawn if isinstance(drawn, int) else clients
    changes: Changes = {
        "data.partition": {"scheme": "iid", "num_clients": 1},
        "federation.clients_per_round": 1,
        "federation.weighting": "uniform",
        **_alone(base),
    }
    if "participation" in federation:
        changes["federation.participation"] = {"scheme": "uniform"}
    name = written_name(federation.get("strategy"))
    kind = algorithms().get(name)
    if kind is not None and (kind.uses_each_update or kind.weighs_steps):
        changes["federation.strategy"] = "fedavg"
    if base.get("faults"):
        changes["faults"] = []
    if isinstance(batch := local.get("batch_size"), int):
        changes["local.batch_size"] = batch * drawn
    if isinstance(rate := _section(privacy, "sampling").get("rate"), float):
        changes["privacy.sampling.rate"] = rate * drawn / clients
    return changes


def _perturbed(kind: str) -> Callable[[Mapping[str, Any]], Changes]:
    def changes(base: Mapping[str, Any]) -> Changes:
        found: Changes = {"privacy.mechanism": {"name": kind}, **_alone(base), **_local_trust(base)}
        gradient_keys = {
            "max_grad_norm": None,
            "sampling": "poisson",
            "clipping": "flat",
            "noise_correlation": "none",
        }
        privacy = _section(base, "privacy")
        return found | {
            f"privacy.{key}": value for key, value in gradient_keys.items() if key in privacy
        }

    return changes


def _alone(base: Mapping[str, Any]) -> Changes:
    """Return the changes of an arm that makes no secure sums."""
    found = {} if base.get("secure_aggregation") is None else {"secure_aggregation": None}
    return {**found, **_local_trust(base)}


def _local_trust(base: Mapping[str, Any]) -> Changes:
    privacy = _section(base, "privacy")
    return (
        {} if written_name(privacy.get("trust", "local")) == "local" else {"privacy.trust": "local"}
    )


def _without_noise_weights(base: Mapping[str, Any]) -> Changes:
    weighting = _section(base, "federation").get("weighting")
    return {"federation.weighting": "examples"} if written_name(weighting) == "noise" else {}


def _absent(base: Mapping[str, Any], section: str, key: str) -> Changes:
    return {f"{section}.{key}": None} if key in _section(base, section) else {}


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


ARMS: dict[str, Arm] = {
    "plain": Arm(
        "the same federation without differential privacy",
        "no privacy: nobody's examples are protected from anyone who sees updates or models.",
        _plain,
    ),
    "pooled": Arm(
        "all examples on one client, which trains by the same steps with lots as large as those of "
        "a round together",
        "one holder of all examples is trusted with them; its ε protects them from those who see "
        "models, and nothing protects them from the holder.",
        _pooled,
    ),
    "local_only": Arm(
        "a model for each client, which learns nothing from the others; scored on the public test "
        "set, as the mean over clients",
        "each client is trusted with its own examples; its ε protects them from those who see its "
        "model. Scores are means over the clients' own models.",
        _local_only,
    ),
    "output_perturbation": Arm(
        "noise on each trained linear model in place of gradients; set "
        "mechanism.max_feature_norm, and weight_decay beside it",
        "as with noise on gradients, a server is not trusted; one release of a trained model has "
        "noise for the sensitivity of its training.",
        _perturbed("output_perturbation"),
    ),
    "input_perturbation": Arm(
        "noise on every example, once, in place of gradients; set mechanism.max_feature_norm",
        "nobody is trusted: the noisy examples themselves may be published, which is more than the "
        "other arms release.",
        _perturbed("input_perturbation"),
    ),
}


def arm_changes(name: str, base: Mapping[str, Any]) -> Changes:
    """Return the changes of an arm to a base experiment.

    Args:
        name: of the arm, a key of `ARMS`.
        base: the content of the base experiment.

    Raises:
        ArmError: the base has no such arm.
    """
    return ARMS[name].changes(base)


def arm_notes(arms: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each arm of a comparison: what it protects, and whom it trusts.

    Args:
        arms: name of the arm of each variant that has one.
    """
    for arm, entry in ARMS.items():
        names = [variant for variant, own in arms.items() if own == arm]
        if names:
            yield f"{', '.join(names)} (arm {arm}): {entry.note}"
