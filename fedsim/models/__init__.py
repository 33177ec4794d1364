"""Models, per-example losses and task metrics."""
