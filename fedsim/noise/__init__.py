"""Integer noise of standard deviation 2²⁴: the grid on which a step is released."""
