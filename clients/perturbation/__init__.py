"""Noise at other places than gradients: on a trained model, or on the examples themselves."""
