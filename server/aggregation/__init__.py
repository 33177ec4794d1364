"""Aggregation of client updates: weighted means, noisy sums, and the clients' weights."""
