"""Who sees what: noise of sums, and the claims of each observer."""
