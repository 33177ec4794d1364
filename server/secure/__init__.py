"""Server side of secure aggregation: protocols, helpers, and the record of released sums."""
