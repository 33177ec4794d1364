"""Keys of the experiment file that moved, so that a message names the new place."""

MOVED_KEYS = {
    "federation.strategy.lr": "federation.strategy.server_lr",
    "privacy.perturbation": "privacy.mechanism",
    "privacy.max_feature_norm": "privacy.mechanism.max_feature_norm",
    "privacy.max_target_norm": "privacy.mechanism.max_target_norm",
    "secure_aggregation.ring_bits": "secure_aggregation.encoding.ring_bits",
    "secure_aggregation.frac_bits": "secure_aggregation.encoding.frac_bits",
    "secure_aggregation.value_bound": "secure_aggregation.encoding.value_bound",
    "secure_aggregation.range_policy": "secure_aggregation.encoding.range_policy",
    "secure_aggregation.payload": "secure_aggregation.encoding.payload",
    "secure_aggregation.max_weight": "secure_aggregation.encoding.max_weight",
    "secure_aggregation.max_clients": "secure_aggregation.encoding.max_clients",
    "secure_aggregation.rounding": "secure_aggregation.encoding.rounding",
    "secure_aggregation.guard_bits": "secure_aggregation.encoding.guard_bits",
    "secure_aggregation.combine_timeout_s": "secure_aggregation.protocol.combine_timeout_s",
    "secure_aggregation.combine_retries": "secure_aggregation.protocol.combine_retries",
    "secure_aggregation.threshold": "secure_aggregation.protocol.threshold",
    "secure_aggregation.corrupt_fraction": "secure_aggregation.protocol.corrupt_fraction",
    "secure_aggregation.dropout_fraction": "secure_aggregation.protocol.dropout_fraction",
    "secure_aggregation.security_bits": "secure_aggregation.protocol.security_bits",
    "secure_aggregation.helper_key_fingerprints": "secure_aggregation.keys.helper_fingerprints",
    "secure_aggregation.helper_key_files": "secure_aggregation.keys.helper_files",
    "secure_aggregation.client_key_fingerprints": "secure_aggregation.keys.client_fingerprints",
    "secure_aggregation.client_key_files": "secure_aggregation.keys.client_files",
}
"""The new dotted key of each old one; a key that fell away has no place here."""
