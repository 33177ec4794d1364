"""Public random directions of zeroth-order steps."""
