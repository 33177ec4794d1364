"""Empirical privacy audit: the measured leakage of each client, beside its claimed ε."""
