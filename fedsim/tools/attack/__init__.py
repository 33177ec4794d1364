"""Privacy audit by attacks: compares the measured leakage of each client with its claimed ε."""
