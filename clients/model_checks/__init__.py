"""Checks that a model and a loss treat every example on its own."""
