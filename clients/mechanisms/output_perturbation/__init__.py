"""Noise on a linear model that was trained without noise."""
