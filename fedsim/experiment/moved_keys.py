"""Keys of the experiment file that moved, so that a message names the new place."""

MOVED_KEYS = {
    "federation.strategy.lr": "federation.strategy.server_lr",
    "privacy.colluding_clients": "privacy.trust.colluding_clients",
    "privacy.fallback_epsilon": "privacy.trust.fallback_epsilon",
    "privacy.groups": "privacy.clipping.groups",
    "privacy.clip_rule": "privacy.clipping.rule",
    "privacy.noise_allocation": "privacy.clipping.noise_allocation",
    "privacy.clip_quantile": "privacy.clipping.quantile",
    "privacy.clip_learning_rate": "privacy.clipping.learning_rate",
    "privacy.clip_count_noise": "privacy.clipping.count_noise",
    "privacy.sampling_rate": "privacy.sampling.rate",
    "privacy.declared_examples": "privacy.adjacency.declared_examples",
    "privacy.orders": "privacy.accountant.orders",
}
"""The new dotted key of each old one; a key that fell away has no place here."""
