"""Settings and public random directions of zeroth-order steps, which use losses, not gradients."""
