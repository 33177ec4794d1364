"""Rules of trust models, privacy units, and the secure aggregation that they rely on.

Each message names a condition of docs/explain/trust_models.md that the file breaks.
"""

from collections.abc import Collection
from operator import attrgetter
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
# Keys of the section that act on examples: the values that are allowed, and the fix.
_BATCHES = "remove sampling: local training draws batches as without privacy"
_CLIPPING = "use clipping: flat or adaptive, of the whole update"
_EXAMPLE_KEYS: dict[str, tuple[tuple[object, ...], str]] = {
    "sampling.name": (("poisson",), _BATCHES),
    "sampling.rate": ((None,), "remove the rate; local.batch_size sets the batches"),
    "clipping.groups": (({},), "remove groups: one bound is for the whole update"),
    "clipping.name": (LINEAR_CLIPPINGS["client"], _CLIPPING),
}


def _check_client_unit(privacy: PrivacySettings, sections: Sections, *, votes: bool) -> Mistakes:
    """Check that a guarantee for whole clients is proven; votes have a fixed size and no bound."""
    local, federation = sections.local, sections.federation
    if privacy.max_update_norm is None and not votes:
        yield mistake(
            "privacy: unit: client needs max_update_norm, the L2 bound of what one client "
            "contributes"
        )
    if local is not None and local.epochs is not None:
        yield mistake(
            "local.epochs: makes a client's steps follow from its size, which is part of what "
            "unit: client protects; use local.steps"
        )
    for key, (allowed, fix) in _EXAMPLE_KEYS.items():
        if attrgetter(key)(privacy) not in allowed:
            yield ("privacy", *key.removesuffix(".name").split(".")), f"{_WHY}; {fix}"
    for path, key in example_keys_of_clients(privacy):
        fix = "remove it: all clients have one max_update_norm"
        yield path, f"{key} acts on examples, and {_WHY}; {fix}"
    if privacy.clipping.name == "adaptive" and privacy.trust.fallback_epsilon is not None:
        yield mistake(
            "privacy.trust.fallback_epsilon: has no share of the noise planned for the bit that "
            "adaptive clipping learns from; use clipping: flat, or remove fallback_epsilon"
        )
    if federation is not None:
        weights = federation.weights
        if privacy.clipping.name == "adaptive" and not (weights.is_uniform or weights.uses_sizes):
            yield mistake(
                "federation.weighting: adaptive clipping counts every client once; use weighting: "
                "uniform, or clipping: flat"
            )
        yield from _check_correlation(privacy, federation)


def _check_correlation(privacy: PrivacySettings, federation: FederationSettings) -> Mistakes:
    """Check that the noise of rounds cancels, and that each client's rounds are far apart."""
    scheme, trust = federation.participation.scheme, privacy.trust.name
    if not privacy.is_correlated:
        return
    if trust != "central":
        yield mistake(
            f"privacy.noise_correlation: trust: {trust} has no proof for noise that is correlated "
            f"from round to round: {_WHY_CENTRAL[trust]}; use trust: central, or "
            "noise_correlation: none"
        )
    if scheme != SCHEME:
        yield mistake(
            f"federation.participation: scheme {scheme} does not keep the rounds of a client "
            "apart, and noise_correlation is charged for rounds that are; use participation: "
            f"{SCHEME}, or noise_correlation: none"
        )


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
    if secure is not None:
        yield from _check_grid(secure)
    if not privacy.release_kind.protects_client:
        yield from _check_step(privacy, local, failed)
    if privacy.on_exhausted != "refuse":
        yield mistake(
            "privacy.on_exhausted: the noise of a sum is planned for the whole run, so no client "
            f"may leave with its budget spent, got {privacy.on_exhausted}; use on_exhausted: refuse"
        )


def _check_shares(
    privacy: PrivacySettings, secure: SecureAggregationSettings | None, failed: Collection[str]
) -> Mistakes:
    """Check that the server sees only sums, each with enough noise from honest clients."""
    if secure is None:
        yield mistake(
            "privacy.trust: distributed protects from those who see sums, and without "
            "secure_aggregation the server sees each update; add secure_aggregation: {min_clients: "
            "...}, or use trust: local or central"
        )
        return
    if "hidden_updates" in failed:
        yield mistake(
            "secure_aggregation.protocol: quantized shows every update to the server, and "
            "distributed trust needs sums; use additive, or trust: local"
        )
    if "min_clients" not in secure.model_fields_set:
        yield mistake(
            "secure_aggregation: distributed trust needs min_clients in the file: the noise is "
            "planned for the smallest sum that is ever opened; the more clients, the less noise "
            "each adds"
        )
    elif secure.min_clients <= privacy.trust.colluding_clients:
        yield mistake(
            "privacy.trust.colluding_clients: must be below secure_aggregation.min_clients "
            f"({secure.min_clients}), got {privacy.trust.colluding_clients}: no honest client "
            "would be left in the smallest sum; raise min_clients"
        )


def _check_grid(secure: SecureAggregationSettings) -> Mistakes:
    """Check that the file sets no encoding other than the integer grid of the noise."""
    for key, value in secure.encoding:
        if key in _GRID_KEYS and value != EncodingSettings.model_fields[key].default:
            yield mistake(
                f"secure_aggregation.encoding.{key}: a noisy sum adds integers of the noise's own "
                f"grid, in 64 bits and with weight 1; remove {key}"
            )


def _check_step(
    privacy: PrivacySettings, local: LocalSettings | None, failed: Collection[str]
) -> Mistakes:
    """Check that an upload is one step, linear in its noise, with a proof for sums of such steps.

    The step has a Poisson batch, a fixed clip norm and independent Gaussian noise.
    """
    trust, clippings = privacy.trust.name, LINEAR_CLIPPINGS["example"]
    if local is not None and local.epochs is not None:
        yield mistake(
            f"local.epochs: gives several steps a round, and trust: {trust} needs exactly one: a "
            "client's second step would depend on its own first one, which no other noise "
            "protects; set steps: 1"
        )
    elif local is not None and "one_step" in failed:
        yield mistake(
            f"local.steps: must be 1 with trust: {trust}, got {local.steps}: a client's second "
            "step would depend on its own first one, which no other noise protects; use more rounds"
        )
    if privacy.clipping.groups and "sum_clipping" in failed:
        yield mistake(
            f"privacy.clipping.groups: trust: {trust} has no proof for groups of parameters, whose "
            "noise differs; remove groups and set max_grad_norm"
        )
    if privacy.clipping.name not in clippings and "sum_clipping" in failed:
        yield mistake(
            f"privacy.clipping: trust: {trust} has no proof for clipping {privacy.clipping.name}; "
            f"use {' or '.join(clippings)}"
        )
    lines = {
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
        yield mistake(
            "privacy.clipping: adaptive sends each client's adapted bound to the server in clear, "
            "beside updates that secure_aggregation hides; use clipping: flat, or remove "
            "secure_aggregation"
        )
    section: KeyPath = ("secure_aggregation", "metrics")
    if secure_aggregation.metrics and privacy is not None:
        yield mistake(
            "secure_aggregation.metrics: means over private examples have no noise, and no ε "
            "covers them or their sum; remove metrics, or set privacy: null"
        )
        return
    for name in secure_aggregation.metrics:
        if name not in TRAIN_METRICS:
            known = ", ".join(TRAIN_METRICS)
            yield (*section, name), f"no such metric; choose from {known}"


def check_secure_sums(
    secure_aggregation: SecureAggregationSettings,
    federation: FederationSettings,
    round_sizes: RoundSizes,
) -> Mistakes:
    """Yield (key path, message) if rounds have too few clients for a sum, or too many."""
    secure, (fewest, clients) = secure_aggregation, round_sizes
    if secure.min_clients > fewest:
        of_round = "a round" if fewest == clients else "the smallest round"
        more = "federation.clients_per_round"
        if federation.participation.scheme == "trace":
            more = "federation.participation.min_available, below which a round goes by"
        yield mistake(
            f"secure_aggregation.min_clients: must be at most {fewest}, the clients of {of_round}, "
            f"got {secure.min_clients}; lower it, or raise {more}"
        )
    threshold = secure.protocol.threshold if isinstance(secure.protocol, SecAggSettings) else "auto"
    if threshold != "auto" and not clients // 2 < threshold <= fewest:
        yield mistake(
            f"secure_aggregation.protocol.threshold: must be above half of the {clients} clients "
            f"of a round and at most all of them, got {threshold}; use auto"
        )
    yield from _check_ring(secure, clients, weighted=not federation.weights.is_uniform)


def _check_ring(secure: SecureAggregationSettings, clients: int, *, weighted: bool) -> Mistakes:
    """Check that no secure sum can overflow the range of its integers."""
    # Imported here: numpy is slow to import, and most files do not need it.
    from fedsim.secagg.encoding import FixedPointEncoder
    from fedsim.secagg.errors import CapacityError
    from fedsim.secagg.metrics import MetricGrids

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
            yield mistake(
                f"secure_aggregation.keys.{name}: names {named} keys for {num_clients} clients "
                "(data.partition.num_clients); name one for each client, in their order, or none"
            )
