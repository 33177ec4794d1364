"""Data: built-in and user datasets, the held-out test set, partitions among clients."""
