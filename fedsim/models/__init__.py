"""Models, per-example losses, feature transforms and task metrics."""
