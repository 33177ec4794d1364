"""Privacy ledgers: records of releases, in memory and as a hash-chained file."""
