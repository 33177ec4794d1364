"""Zeroth-order steps: their settings, and their public random directions."""
