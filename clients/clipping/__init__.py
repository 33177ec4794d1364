"""Clipping of per-example gradients to a fixed or an adaptive clipping norm."""
