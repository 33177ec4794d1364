"""Client side of secure aggregation, which encodes, masks or shares, and encrypts an update."""
