"""Integer Gaussian noise of standard deviation 2²⁴, and the release of integer sums with it."""
