"""Integer Gaussian noise of standard deviation 2²⁴, and the release of sums on its grid."""
