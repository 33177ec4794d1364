"""All built-in names of experiment files, such as models and metrics, with descriptions."""

from collections.abc import Mapping

from fedsim.algorithms.algorithm import algorithms
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.metrics import METRICS
from fedsim.data.catalog import DATASETS, PARTITIONS
from fedsim.data.settings import FLWR_SCHEMES
from fedsim.models.catalog import LOSSES, MODELS
from fedsim.models.settings import FEATURES
from fedsim.server.participation.settings import PARTICIPATIONS
from fedsim.simulation.settings import ENGINES, TRACKERS

KEYS = {
    "datasets": "data.dataset",
    "partitions": "data.partition.scheme",
    "models": "model.name",
    "features": "model.features",
    "losses": "model.loss",
    "metrics": "evaluation.metrics",
    "participations": "federation.participation.scheme",
    "strategies": "federation.strategy",
    "weightings": "federation.weighting",
    "optimizers": "local.optimizer.name",
    "trust_models": "privacy.trust",
    "units": "privacy.unit",
    "clippings": "privacy.clipping",
    "samplings": "privacy.sampling",
    "adjacencies": "privacy.adjacency",
    "accountants": "privacy.accountant",
    "secure_aggregation": "secure_aggregation.protocol",
    "personalization": "personalization.method",
    "faults": "faults[].kind",
    "engines": "runtime.engine",
    "trackers": "runtime.trackers",
}
"""The experiment file's key that takes built-in names, for each kind of names."""

_NAMES = {
    "weightings": {
        "uniform": "every update counts the same",
        "examples": "by the number of the client's examples, which must be public",
        "examples_over_noise": "by that number over the client's noise; powers and a largest share",
    },
    "optimizers": {
        "sgd": "stochastic gradient descent, with momentum and weight decay",
        "adam": "Adam (Kingma and Ba 2015), with L2 penalty",
        "adamw": "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
    },
    "trust_models": {
        "local": "nobody sees a value with too little noise: each client adds all of its noise",
        "distributed": "clients add shares of the noise, and only sums are opened",
        "central": "the server is trusted, and adds the noise",
    },
    "units": {
        "example": "one ε protects one training example of a client",
        "client": "one ε protects everything that a client has",
    },
    "clippings": {
        "flat": "one bound for the whole gradient",
        "per_layer": "a bound for each layer",
        "automatic": "every gradient is normalised (Bu et al. 2023)",
        "adaptive": "one bound, learnt from a charged noisy count (Andrew et al. 2021)",
    },
    "adjacencies": {
        "zero_out": "one example's contribution becomes zero; client sizes are public",
        "add_remove": "one example more or less; client sizes are private",
        "replace_one": "one example is another one; client sizes are public",
    },
    "accountants": {
        "pld": "privacy loss distributions, the smallest ε",
        "rdp": "Rényi DP, an upper bound that is fast for many clients",
        "moments": "the moments accountant (Abadi et al. 2016), for comparison with older work",
    },
    "secure_aggregation": {
        "additive": "additive shares for two or more aggregators",
        "secagg": "pairwise masks for a single server (Bonawitz et al. 2017)",
        "secagg_plus": "pairwise masks of few neighbours each (Bell et al. 2020)",
        "quantized": "the same numbers without cryptography, as a control",
    },
    "personalization": {
        "fine_tune": "a client trains the final global model on its own examples",
        "ditto": "fine-tuning with a pull towards the global model (Li et al. 2021)",
        "label_prior": "the logits are shifted by the client's own share of each class",
    },
    "faults": {
        "dropout_before": "a client does not answer, and is not charged",
        "dropout_during": "a client is lost in the middle of its training, after its charge",
        "dropout_after": "a client trains, and its upload is lost",
        "straggler": "a client answers some simulated seconds late",
        "error": "the training of a client raises an exception",
        "nan": "an upload with NaN",
        "inf": "an upload with infinite values",
        "wrong_shape": "an upload of another shape",
        "empty": "a client without examples",
    },
}


def catalog() -> dict[str, dict[str, str]]:
    """Return the built-in names and their descriptions: `{kind: {name: description}}`."""
    samplings = {
        name: scheme.description.replace("`", "") for name, scheme in SAMPLING_SCHEMES.items()
    }
    names: dict[str, Mapping[str, str]] = {
        **_NAMES,
        "datasets": {name: entry.description for name, entry in DATASETS.items()},
        "partitions": {
            **PARTITIONS,
            **dict.fromkeys(FLWR_SCHEMES, "this partitioner of flwr-datasets (extra datasets)"),
        },
        "models": {name: entry.description for name, entry in MODELS.items()},
        "features": FEATURES,
        "losses": LOSSES,
        "metrics": {name: entry.description for name, entry in METRICS.items()},
        "participations": PARTICIPATIONS,
        "strategies": {name: entry.description for name, entry in algorithms().items()},
        "samplings": samplings,
        "engines": ENGINES,
        "trackers": TRACKERS,
    }
    return {kind: dict(names[kind]) for kind in KEYS}
