"""Noise on every example, once."""
