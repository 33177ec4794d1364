"""DP-SGD, from the sampled lot to the noisy gradient."""
