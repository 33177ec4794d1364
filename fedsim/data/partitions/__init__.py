"""Partitions of the training examples among clients: random, natural or by a function."""
