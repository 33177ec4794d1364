"""Zeroth-order optimization: slopes of the loss along public directions in place of gradients."""
