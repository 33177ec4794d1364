"""Client side of PATE (private aggregation of teacher ensembles): noisy votes on public queries."""
