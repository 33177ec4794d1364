"""Runs of experiments: write a run directory, resume the run, and check its files."""
