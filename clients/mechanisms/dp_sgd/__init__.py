"""A step of DP-SGD: a drawn lot, clipped gradients, and noise on their sum."""
