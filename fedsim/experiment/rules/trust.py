"""Rules of trust models, privacy units, and the secure aggregation that they rely on.

Each message names a condition of docs/explain/trust_models.md that the file breaks.
"""

from collections.abc import Collection
from typing import Any

from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.conditions import LINEAR_CLIPPINGS, unmet
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import Mistakes
from fedsim.experiment.rules import RoundSizes, Sections, example_keys_of_clients, mistake
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.noise.correlated.settings import SCHEME
from fedsim.secagg.settings import EncodingSettings, SecAggSettings, SecureAggregationSettings
from fedsim.server.settings import FederationSettings

_WHY = "with unit: client nothing is released of single examples"


def _check_client_unit(privacy: PrivacySettings, sections: Sections, *, votes: bool) -> Mistakes:
    """Check that a guarantee for whole clients is proven; votes have a fixed size and no bound."""
    local, federation = sections.local, sections.federation
    if privacy.max_update_norm is None and not votes:
        needed = "max_update_norm, the L2 bound of what one client contributes"
        yield mistake(f"privacy: unit: client needs {needed}")
    if local is not None and local.epochs is not None:
        why = "makes a client's steps follow from its size"
        secret = "which is part of what unit: client protects"
        yield mistake(f"local.epochs: {why}, {secret}; use local.steps")
    if privacy.sampling.name != "poisson":
        fix = "remove sampling: local training draws batches as without privacy"
        yield mistake(f"privacy.sampling: {_WHY}; {fix}")
    if privacy.sampling.rate is not None:
        fix = "remove the rate; local.batch_size sets the batches"
        yield mistake(f"privacy.sampling.rate: {_WHY}; {fix}")
    if privacy.clipping.name not in LINEAR_CLIPPINGS["client"]:
        fix = "use clipping: flat or adaptive, of the whole update"
        yield mistake(f"privacy.clipping: {_WHY}; {fix}")
    for path, key in example_keys_of_clients(privacy):
        fix = "remove it: all clients have one max_update_norm"
        yield path, f"{key} acts on examples, and {_WHY}; {fix}"
    if privacy.clipping.name == "adaptive" and privacy.trust.fallback_epsilon is not None:
        why = "has no share of the noise planned for the bit that adaptive clipping learns from"
        fix = "use clipping: flat, or remove fallback_epsilon"
        yield mistake(f"privacy.trust.fallback_epsilon: {why}; {fix}")
    if federation is None:
        return
    weights, scheme = federation.weights, federation.participation.scheme
    if privacy.clipping.name == "adaptive" and not (weights.is_uniform or weights.uses_sizes):
        fix = "use weighting: uniform, or clipping: flat"
        yield mistake(f"federation.weighting: adaptive clipping counts every client once; {fix}")
    if not privacy.is_correlated:
        return
    trust = privacy.trust.name
    if trust != "central":
        why = f"trust: {trust} has no proof for noise that is correlated from round to round"
        fix = "use trust: central, or noise_correlation: none"
        yield mistake(f"privacy.noise_correlation: {why}: {_WHY_CENTRAL[trust]}; {fix}")
    if scheme != SCHEME:
        why = f"scheme {scheme} does not keep the rounds of a client apart"
        charged = "noise_correlation is charged for rounds that are"
        fix = f"use participation: {SCHEME}, or noise_correlation: none"
        yield mistake(f"federation.participation: {why}, and {charged}; {fix}")


_WHY_CENTRAL = {
    "local": "a client takes part in few rounds, and the noise of other clients is not its own",
    "distributed": "a client that drops out takes its share along, and what the next round would "
    "cancel was never added",
}
# Of secure aggregation: the grid of the noise takes their place in a noisy sum.
_GRID_KEYS = EncodingSettings.model_fields.keys() - {"max_clients"}


def check_trust(privacy: PrivacySettings, sections: Sections) -> Mistakes:
    """Yield (key path, message) for settings that the trust model or privacy unit excludes."""
    if "secure_aggregation" in sections.mistaken:
        return
    local, secure, votes = sections.local, sections.secure_aggregation, sections.task == "pate"
    training: dict[str, Any] = {}  # that of a section with mistakes fails no condition
    if local is not None:
        training = {"local_steps": local.steps, "optimizer": local.optimizer_name}
    protocol = None if secure is None else secure.protocol.name
    failed = unmet(privacy.choices(votes=votes, protocol=protocol, **training))
    if "adjacency" in failed:
        yield mistake(f"privacy.adjacency: {failed['adjacency']}; use zero_out or replace_one")
    if privacy.release_kind.protects_client:
        yield from _check_client_unit(privacy, sections, votes=votes)
    if privacy.trust.name == "local":
        return
    if privacy.trust.name == "distributed":
        yield from _check_shares(privacy, secure, failed)
    for key, value in () if secure is None else secure.encoding:
        if key in _GRID_KEYS and value != EncodingSettings.model_fields[key].default:
            why = "a noisy sum adds integers of the noise's own grid, in 64 bits and with weight 1"
            yield mistake(f"secure_aggregation.encoding.{key}: {why}; remove {key}")
    if not privacy.release_kind.protects_client:
        yield from _check_step(privacy, local, failed)
    if privacy.on_exhausted != "refuse":
        why = "the noise of a sum is planned for the whole run"
        rule = f"no client may leave with its budget spent, got {privacy.on_exhausted}"
        yield mistake(f"privacy.on_exhausted: {why}, so {rule}; use on_exhausted: refuse")


def _check_shares(
    privacy: PrivacySettings, secure: SecureAggregationSettings | None, failed: Collection[str]
) -> Mistakes:
    """Check that the server sees only sums, each with enough noise from honest clients."""
    if secure is None:
        what = "distributed protects from those who see sums"
        why = "without secure_aggregation the server sees each update"
        fix = "add secure_aggregation: {min_clients: ...}, or use trust: local or central"
        yield mistake(f"privacy.trust: {what}, and {why}; {fix}")
        return
    if "hidden_updates" in failed:
        why = "quantized shows every update to the server, and distributed trust needs sums"
        yield mistake(f"secure_aggregation.protocol: {why}; use additive, or trust: local")
    if "min_clients" not in secure.model_fields_set:
        why = "the noise is planned for the smallest sum that is ever opened"
        hint = "the more clients, the less noise each adds"
        needed = "distributed trust needs min_clients in the file"
        yield mistake(f"secure_aggregation: {needed}: {why}; {hint}")
    elif secure.min_clients <= privacy.trust.colluding_clients:
        least, given = secure.min_clients, privacy.trust.colluding_clients
        rule = f"must be below secure_aggregation.min_clients ({least}), got {given}"
        why = "no honest client would be left in the smallest sum; raise min_clients"
        yield mistake(f"privacy.trust.colluding_clients: {rule}: {why}")


def _check_step(
    privacy: PrivacySettings, local: LocalSettings | None, failed: Collection[str]
) -> Mistakes:
    """Check that an upload is one step, linear in its noise, with a proof for sums of such steps.

    The step has a Poisson batch, a fixed clip norm and independent Gaussian noise.
    """
    trust, clippings = privacy.trust.name, LINEAR_CLIPPINGS["example"]
    if local is not None and "one_step" in failed:
        rule = f"local.steps: must be 1 with trust: {trust}, got {local.steps}"
        if local.epochs is not None:
            needed = f"trust: {trust} needs exactly one"
            rule = f"local.epochs: gives several steps a round, and {needed}"
        why = "a client's second step would depend on its own first one"
        fix = "set steps: 1, and use more rounds"
        yield mistake(f"{rule}: {why}, which no other noise protects; {fix}")
    lines = {
        "sum_clipping": f"privacy.clipping: trust: {trust} has no proof for "
        f"{privacy.recorded_clipping}; use {' or '.join(clippings)}, with one max_grad_norm for "
        "all parameters",
        "plain_sgd": "local.optimizer: must be sgd without momentum and weight_decay with trust: "
        f"{trust}: the upload must be linear in the noise; use federation.strategy: fedavgm for "
        "momentum",
        "poisson_batches": f"privacy.sampling: trust: {trust} has no proof for sampling "
        f"{privacy.sampling.name}; use poisson",
        "cell_of_correlation": f"privacy.noise_correlation: trust: {trust} has no proof for "
        f"noise_correlation {privacy.choices().correlation}; use none",
    }
    yield from (mistake(line) for condition, line in lines.items() if condition in failed)


def check_secure_aggregation(
    secure_aggregation: SecureAggregationSettings, sections: Sections
) -> Mistakes:
    """Yield (key path, message) if clients would send private values outside of secure sums."""
    privacy = sections.privacy
    if privacy is not None and privacy.clipping.name == "adaptive" and not privacy.counts_in_sums:
        what = "adaptive sends each client's adapted bound to the server in clear"
        why = "beside updates that secure_aggregation hides"
        fix = "use clipping: flat, or remove secure_aggregation"
        yield mistake(f"privacy.clipping: {what}, {why}; {fix}")
    if secure_aggregation.metrics and privacy is not None:
        why = "means over private examples have no noise, and no ε covers them or their sum"
        yield mistake(f"secure_aggregation.metrics: {why}; remove metrics, or set privacy: null")
        return
    for name in secure_aggregation.metrics:
        if name not in TRAIN_METRICS:
            path: KeyPath = ("secure_aggregation", "metrics", name)
            yield path, f"no such metric; choose from {', '.join(TRAIN_METRICS)}"


def check_secure_sums(
    secure_aggregation: SecureAggregationSettings,
    federation: FederationSettings,
    round_sizes: RoundSizes,
) -> Mistakes:
    """Yield (key path, message) if rounds have too few clients, or a sum overflows its integers."""
    secure, (fewest, clients) = secure_aggregation, round_sizes
    if secure.min_clients > fewest:
        of_round = "a round" if fewest == clients else "the smallest round"
        more = "federation.clients_per_round"
        if federation.participation.scheme == "trace":
            more = "federation.participation.min_available, below which a round goes by"
        rule = f"must be at most {fewest}, the clients of {of_round}, got {secure.min_clients}"
        yield mistake(f"secure_aggregation.min_clients: {rule}; lower it, or raise {more}")
    threshold = secure.protocol.threshold if isinstance(secure.protocol, SecAggSettings) else "auto"
    if threshold != "auto" and not clients // 2 < threshold <= fewest:
        rule = f"must be above half of the {clients} clients of a round and at most all of them"
        yield mistake(f"secure_aggregation.protocol.threshold: {rule}, got {threshold}; use auto")
    # Imported here: numpy is slow to import, and most files do not need it.
    from fedsim.secagg.encoding import FixedPointEncoder
    from fedsim.secagg.errors import CapacityError
    from fedsim.secagg.metrics import MetricGrids

    weighted = not federation.weights.is_uniform
    try:
        encoder = FixedPointEncoder.from_settings(
            secure.encoding, num_clients=clients, weighted=weighted
        )
        MetricGrids.from_bounds(secure.metrics, encoder)
    except CapacityError as error:
        yield mistake(f"secure_aggregation: the sum does not fit into the ring: {error}")


def check_client_keys(secure_aggregation: SecureAggregationSettings, num_clients: int) -> Mistakes:
    """Yield (key path, message) for each list of client keys that is neither empty nor complete."""
    for name in ("client_fingerprints", "client_files"):
        named = len(getattr(secure_aggregation.keys, name))
        if named not in (0, num_clients):
            given = f"names {named} keys for {num_clients} clients (data.partition.num_clients)"
            fix = "name one for each client, in their order, or none"
            yield mistake(f"secure_aggregation.keys.{name}: {given}; {fix}")
