"""All built-in names of experiment files, with one line of description each."""

from fedsim.data.catalog import DATASETS, PARTITIONS
from fedsim.models.catalog import LOSSES, MODELS
from fedsim.models.features.settings import FEATURES
from fedsim.models.scores.catalog import METRICS
from fedsim.server.aggregation.strategy_settings import STRATEGIES


def catalog() -> dict[str, dict[str, str]]:
    """Return the names by kind, with their descriptions."""
    return {
        "datasets": {name: entry.description for name, entry in DATASETS.items()},
        "partitions": dict(PARTITIONS),
        "models": {name: entry.description for name, entry in MODELS.items()},
        "features": dict(FEATURES),
        "losses": dict(LOSSES),
        "metrics": {name: entry.description for name, entry in METRICS.items()},
        "strategies": {name: entry.description for name, entry in STRATEGIES.items()},
    }
