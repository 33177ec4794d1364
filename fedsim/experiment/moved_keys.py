"""Keys of the experiment file that moved, so that a message names the new place."""

MOVED_KEYS = {
    "federation.strategy.lr": "federation.strategy.server_lr",
}
"""The new dotted key of each old one; a key that fell away has no place here."""
