"""Kinds of private release: one contract, one planner, and a folder for each kind."""
