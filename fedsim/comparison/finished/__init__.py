"""Comparison of run directories that exist: nothing is run."""
