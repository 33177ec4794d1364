"""Privacy audit by attacks: the measured leakage of each client, compared with its claimed ε."""
