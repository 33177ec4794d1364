"""DP-SGD: a step draws a batch, clips per-example gradients, and adds noise to their sum."""
