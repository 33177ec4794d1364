"""Zeroth-order steps: slopes of the loss along public directions, in place of gradients."""
