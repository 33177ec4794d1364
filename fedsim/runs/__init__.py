"""Run an experiment into a run directory, resume the run, and check its files."""
