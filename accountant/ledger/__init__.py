"""Ledgers: what was released, in memory and as a hash-chained file."""
