"""Local training in one round, for a single client or for several clients at once."""
