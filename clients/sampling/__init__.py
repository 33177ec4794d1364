"""Sampling of batches: which examples enter a step, and the privacy event that is charged."""
