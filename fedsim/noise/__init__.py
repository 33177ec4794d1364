"""Integer Gaussian noise of standard deviation 2²⁴, and the release of sums rounded to integers."""
