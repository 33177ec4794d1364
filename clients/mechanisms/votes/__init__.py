"""The release of a client's votes on public queries, for PATE."""
