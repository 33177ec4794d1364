"""Client side of secure aggregation: it encodes an update, and masks it or splits it in shares."""
