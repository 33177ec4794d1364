"""Partitions of the training examples among clients: random, by a column, or by a function."""
