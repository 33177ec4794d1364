"""Zeroth-order optimization: slopes of the loss along public directions replace gradients."""
