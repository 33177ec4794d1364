"""Rules of `secure_aggregation`."""

from collections.abc import Iterator, Mapping

from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage
from fedsim.experiment.rules.sections import Sections
from fedsim.models.catalog import TRAIN_METRICS
from fedsim.secagg.settings import SecAggSettings, SecureAggregationSettings


def check_secure_aggregation(sections: Sections) -> Iterator[PathMessage]:
    """Yield the mistakes in `secure_aggregation`."""
    secure = sections.secure_aggregation
    if secure is None or sections.federation is None or sections.data is None:
        return
    privacy = sections.privacy
    if privacy is not None and privacy.clipping.name == "adaptive" and not privacy.counts_in_sums:
        yield (
            ("privacy", "clipping"),
            "adaptive sends each client's adapted bound to the server in clear, beside updates "
            "that secure_aggregation hides; use clipping: flat, or remove secure_aggregation",
        )
    yield from _check_metrics(secure.metrics, private=sections.privacy is not None)
    if sections.round_sizes is not None:
        yield from _check_sizes(secure, sections, *sections.round_sizes)


def _check_sizes(
    secure: SecureAggregationSettings, sections: Sections, fewest: int, clients: int
) -> Iterator[PathMessage]:
    """Yield the mistakes that depend on the numbers of clients of the rounds."""
    section: KeyPath = ("secure_aggregation",)
    if secure.min_clients > fewest:
        of_round = "a round" if fewest == clients else "the smallest round"
        yield (
            (*section, "min_clients"),
            f"must be at most {fewest}, the clients of {of_round}, got {secure.min_clients}; lower "
            f"it, or raise {_ways_to_more_clients(sections)}",
        )
    threshold = secure.protocol.threshold if isinstance(secure.protocol, SecAggSettings) else "auto"
    if threshold != "auto" and not clients // 2 < threshold <= fewest:
        yield (
            (*section, "protocol", "threshold"),
            f"must be above half of the {clients} clients of a round and at most all of them, got "
            f"{threshold}; use auto",
        )
    if sections.num_clients is not None:
        yield from _check_client_keys(secure, sections.num_clients)
    # Imported here: numpy is slow to import, and most files do not need it.
    from fedsim.secagg.encoding import FixedPointEncoder
    from fedsim.secagg.errors import CapacityError
    from fedsim.secagg.metrics import MetricGrids

    weighted = sections.federation is not None and not sections.federation.weights.is_uniform
    try:
        encoder = FixedPointEncoder.from_settings(
            secure.encoding, num_clients=clients, weighted=weighted
        )
        MetricGrids.from_bounds(secure.metrics, encoder)
    except CapacityError as error:
        yield section, f"the sum does not fit into the ring: {error}"


def _ways_to_more_clients(sections: Sections) -> str:
    federation = sections.federation
    if federation is not None and federation.participation.scheme == "trace":
        return "federation.participation.min_available, below which a round goes by"
    return "federation.clients_per_round"


def _check_client_keys(secure: SecureAggregationSettings, clients: int) -> Iterator[PathMessage]:
    for name in ("client_fingerprints", "client_files"):
        named = len(getattr(secure.keys, name))
        if named not in (0, clients):
            yield (
                ("secure_aggregation", "keys", name),
                f"names {named} keys for {clients} clients "
                "(data.partition.num_clients); name one for each client, in their order, or none",
            )


def _check_metrics(metrics: Mapping[str, float], *, private: bool) -> Iterator[PathMessage]:
    section: KeyPath = ("secure_aggregation", "metrics")
    if metrics and private:
        yield (
            section,
            "means over private examples have no noise, and no ε covers them or their sum; remove "
            "metrics, or set privacy: null",
        )
        return
    for name in metrics:
        if name not in TRAIN_METRICS:
            known = ", ".join(TRAIN_METRICS)
            yield (*section, name), f"no such metric; choose from {known}"
