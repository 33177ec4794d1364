"""Noise that is correlated from step to step."""
