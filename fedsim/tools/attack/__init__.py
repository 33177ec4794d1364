"""Empirical privacy audit: the measured leakage of each client, compared with its claimed ε."""
