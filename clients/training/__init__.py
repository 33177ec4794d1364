"""Local training of one round, for one client or for vectorized clients."""
