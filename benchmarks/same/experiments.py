"""The experiments of `same_results.py`: small ones, of every kind of private release.

`EXPERIMENTS` has the keys that each sets in `BASE`. Where a key of the experiment file gets another
name, it gets it here too, and the results stay comparable: each checkout reads its own table.
"""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

BASE: Settings = {
    "name": "same",
    "seed": 3,
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 6, "alpha": 0.5, "min_examples": 40},
    },
    "model": {"name": "mlp", "args": {"hidden": [12], "activation": "tanh"}},
    "federation": {"rounds": 3},
    "local": {"steps": 2, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
_SUMS: Settings = {
    "local.steps": 1,
    "privacy": {"trust": "distributed", "target_epsilon": 6, "delta": 1e-3, "max_grad_norm": 0.5},
}
_USERS: Settings = {
    "local.batch_size": 10,
    "privacy": {"unit": "client", "noise_multiplier": 2.0, "delta": 1e-2, "max_update_norm": 0.2},
}
_ROUNDS: Settings = {
    **_USERS,
    "federation": {
        "rounds": 6,
        "clients_per_round": 2,
        "participation": {"scheme": "min_separation"},
    },
    "privacy.trust": "central",
}
_LINEAR: Settings = {
    "model": {"name": "logistic", "features": ["unit_norm"]},
    "local": {
        "steps": 5,
        "batch_size": "full",
        "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.05},
    },
    "privacy": {"mechanism": {"max_feature_norm": 1.0}, "target_epsilon": 8, "delta": 1e-3},
}


def _sums(protocol: str | Settings, **keys: Any) -> Settings:
    """Return the settings of secure sums; a client is lost in one of them."""
    lost = {"kind": "dropout_after", "clients": [4], "rounds": [2]}
    own = {"protocol": protocol, "min_clients": 4, **keys}
    return {**_SUMS, "secure_aggregation": own, "faults": [lost]}


EXPERIMENTS: Mapping[str, Settings] = {
    "dp-sgd": {
        "federation.weighting": "examples_over_noise",
        "privacy.noise_multiplier": None,
        "privacy.target_epsilon": 6,
        "privacy.clients": {"2": {"target_epsilon": 2}, "some": {"share": 0.3, "delta": 1e-4}},
    },
    "cnn": {
        "model": {"name": "cnn", "args": {"channels": [4, 6], "hidden": 8}},
        "local.optimizer": {"name": "adam", "lr": 0.01},
        "privacy.clipping": "automatic",
        "privacy.sampling": "fixed_size",
        "privacy.adjacency": "replace_one",
    },
    "sums-additive": _sums("additive", aggregators=3),
    "sums-secagg": _sums("secagg"),
    "sums-secagg-plus": {
        **_sums({"name": "secagg_plus", "security_bits": 20}),
        "faults": [],
        "data.partition": {"scheme": "iid", "num_clients": 16},
    },
    "sums-quantized": {
        **_sums("quantized", encoding={"rounding": "stochastic"}, metrics={"train_loss": 5.0}),
        "privacy": None,
    },
    "central": {"local.steps": 1, "privacy.trust": "central", "federation.weighting": "examples"},
    "users-local": {**_USERS, "local.optimizer": {"name": "adamw", "lr": 0.01}},
    "users-central": {
        **_USERS,
        "privacy.trust": "central",
        "federation.clients_per_round": 4,
        "federation.participation": {"scheme": "poisson"},
    },
    "users-adaptive": {
        **_USERS,
        "privacy.trust": "central",
        "privacy.clipping": {"name": "adaptive", "count_noise": 1.5},
        "federation.strategy": {"name": "fedadam", "server_lr": 0.05},
    },
    "rounds-identity": {**_ROUNDS, "privacy.noise_correlation": "identity"},
    "rounds-tree": {**_ROUNDS, "privacy.noise_correlation": "tree"},
    "rounds-bands": {**_ROUNDS, "privacy.noise_correlation": {"name": "toeplitz", "bands": 4}},
    "rounds-blt": {
        **_ROUNDS,
        "federation.strategy": {"name": "fedavgm", "momentum": 0.9},
        "privacy.noise_correlation": "blt",
        "privacy.noise_multiplier": None,
        "privacy.target_epsilon": 6,
    },
    "adaptive": {
        "privacy.clipping": "adaptive",
        "privacy.accountant": "rdp",
        "privacy.adjacency": {"name": "add_remove", "declared_examples": 250},
    },
    "per-layer": {
        "privacy.clipping": {
            "name": "per_layer",
            "rule": "by_dimension",
            "noise_allocation": "optimal",
        },
    },
    "groups": {
        "privacy.max_grad_norm": None,
        "privacy.clipping": {
            "name": "flat",
            "groups": {
                "*.weight": {"max_grad_norm": 0.4},
                "*.bias": {"max_grad_norm": 0.1, "noise_multiplier": 3},
            },
        },
    },
    "correlated": {
        "privacy.sampling": "cyclic_poisson",
        "privacy.noise_correlation": {"name": "toeplitz", "bands": 3},
    },
    "shuffle": {"privacy.sampling": "shuffle", "local.max_physical_batch": 8},
    "bins": {"privacy.sampling": "balls_and_bins", "local.vectorized_clients": "off"},
    "votes": {
        "task": "pate",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 20}},
        "federation.rounds": 2,
        "local.batch_size": "full",
        "privacy": {"unit": "client", "trust": "central", "target_epsilon": 8, "delta": 1e-3},
        "pate": {"queries": 30, "sigma_threshold": 4, "sigma": 3, "student": {"steps": 20}},
    },
    "output": {**_LINEAR, "privacy.mechanism.name": "output_perturbation", "federation.rounds": 1},
    "noisy-examples": {**_LINEAR, "privacy.mechanism.name": "input_perturbation"},
    "slopes": {
        **_sums("additive"),
        "model": {"name": "logistic"},
        "local.gradient": {"name": "zeroth_order", "directions": 16},
        "privacy.max_grad_norm": 5,
    },
    "personal": {
        "personalization": {"method": "ditto", "steps": 5, "holdout": 0.2, "public_data": True},
        "model.train": ["3.*"],
    },
    "own-models": {"federation.strategy": {"name": "mr_mtl", "mean_weight": 0.5}},
    "fedprox": {
        "federation.strategy": {"name": "fedprox", "proximal_weight": 0.1},
        "federation.partial_work": {"share": 0.5},
        "local.lr_schedule": {"name": "cosine", "T_max": 4},
    },
    "scaffold": {"federation.strategy": "scaffold", "federation.clients_per_round": 3},
    "buffered": {
        "federation.participation": {"scheme": "buffered", "concurrency": 4, "buffer_size": 2},
    },
    "withdraw": {
        "privacy.target_epsilon": 1.6,
        "privacy.on_exhausted": "withdraw",
        "faults": [{"kind": "error", "clients": [1], "rounds": [1]}],
    },
    "plain": {"privacy": None, "evaluation": {"metrics": ["f1", "accuracy"], "holdout": 0.2}},
    "augmentation": {
        "local.augmentation_multiplicity": 2,
        "local.augmentations": [{"shift": 1}, {"noise": 0.1}],
    },
    "ray": {"runtime": {"engine": "ray", "workers": 2}, "local.vectorized_clients": 2},
}
