"""Random views of an example, whose gradients count as one."""
