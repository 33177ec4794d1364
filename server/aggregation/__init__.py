"""How updates are aggregated: the mean, noisy sums, aggregators, clients' weights."""
