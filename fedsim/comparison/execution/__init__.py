"""Execution of a comparison: a job for every variant and seed, worker processes, reuse of runs."""
